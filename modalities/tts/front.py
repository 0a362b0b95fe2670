"""The device-free half of speech: a script becomes pieces of ids, which the engine says in one breath each."""

from __future__ import annotations

import itertools
import secrets
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.speech.presenter import SpeechPresenter
from polymux.core.speech.script import Pause, Say, read_script
from polymux.core.tasks import Speak
from polymux.core.text.sentences import cut_text, split_sentences
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.text.voices import choose_voice
from polymux.modalities.tts.characters import CharacterReader
from polymux.modalities.tts.work import Piece, SpeakWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

SEEDS = 1 << 63


class SpeechFront(Front):
    """`voices`: the first is the default. `longest`: characters of a piece; `first`: of an answer's first piece."""

    longest = 300
    first = 300

    def __init__(self, voices: list[str], rate: int) -> None:
        self.voices = voices
        self.rate = rate

    @abstractmethod
    def read(self, text: str, voice: str, *, phonemes: bool) -> Piece:
        """One piece; without ids when nothing of the text has a sound."""

    @abstractmethod
    def number(self, voice: str) -> int | None:
        """The speaker, for models that tell them apart by number."""

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Reads up to the first piece with a sound, so that a text without any is refused; the rest is read as the
        engine speaks."""
        if not isinstance(ask, Speak):
            raise InvalidRequest(f"This model does not serve {task}.")
        if ask.seed is not None and not 0 <= ask.seed < SEEDS:
            raise InvalidRequest("seed must be from 0 to 2^63 - 1", param="seed")
        voice = choose_voice(ask.voice, self.voices)
        pieces = self.read_pieces(ask, voice)
        begun: list[Piece] = []
        for piece in pieces:
            begun.append(piece)
            if piece.ids:
                break
        else:
            raise InvalidRequest("nothing in input can be spoken by this model", param="input")
        work = SpeakWork(self.number(voice), secrets.randbelow(1 << 31) if ask.seed is None else ask.seed)
        return Prepared(work, messages=itertools.chain(begun, pieces, [Piece(last=True)]))

    def read_pieces(self, ask: Speak, voice: str) -> Iterator[Piece]:
        """Pieces and pauses in order; none is empty."""
        room = self.first
        for part in read_script(ask):
            match part:
                case Pause(seconds):
                    if seconds:
                        yield Piece(pause=seconds)
                case Say(text, pace, phonemes):
                    for sentence in split_sentences(text):
                        for words in cut_first(sentence, room, self.longest):
                            piece = self.read(words, voice, phonemes=phonemes)
                            if piece.ids:
                                piece.pace = pace
                                room = self.longest
                                yield piece

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return SpeechPresenter(self.rate)

    def describe(self) -> dict[str, Any]:
        return {"sample_rate": self.rate, "voices": list(self.voices)}


def cut_first(text: str, first: int, longest: int) -> list[str]:
    """At most `first` characters, then at most `longest` at a time; joined, they are the text."""
    head = cut_text(text, first)[0] if text else ""
    return [head, *cut_text(text[len(head) :], longest)]


class VitsFront(SpeechFront):
    """Speakers are numbers, and their voices are called so unless the options name them (`voices`)."""

    longest = 200
    first = 80

    def __init__(self, reader: CharacterReader, voices: list[str], rate: int, *, several: bool) -> None:
        super().__init__(voices, rate)
        self.reader = reader
        self._several = several

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> VitsFront:
        """Raises `ModelError`."""
        config = files.config()
        speakers = config.get("num_speakers", 1)
        voices = read_voices(options, speakers)
        return cls(CharacterReader.load(files), voices, config.get("sampling_rate", 16_000), several=speakers > 1)

    def read(self, text: str, voice: str, *, phonemes: bool) -> Piece:
        ids, words = self.reader.read(text, phonemes=phonemes)
        return Piece(ids, words)

    def number(self, voice: str) -> int | None:
        return self.voices.index(voice) if self._several else None


class Around(msgspec.Struct, frozen=True):
    """Ids that stand before and after a prompt's own; `special`: the tokenizer adds its usual ones."""

    special: bool
    before: list[int] = []
    after: list[int] = []


class PromptFront(SpeechFront):
    """Codec language models: a piece is a prompt in which the voice is named."""

    def __init__(
        self, tokenizer: Tokenizer, voices: list[str], rate: int, template: str, *, offset: int, around: Around
    ) -> None:
        """`template` has {voice} and {text}; ids are moved by `offset`, to where the model has its text."""
        super().__init__(voices, rate)
        self.tokenizer = tokenizer
        self.template = template
        self.offset = offset
        self.around = around

    def read(self, text: str, voice: str, *, phonemes: bool) -> Piece:
        if phonemes:
            raise InvalidRequest("this model reads text, not phonemes", param="input_type")
        words = " ".join(text.split())
        if not any(character.isalnum() for character in words):
            return Piece()
        prompt = self.template.replace("{voice}", voice).replace("{text}", words)
        ids = [id + self.offset for id in self.tokenizer.encode(prompt, special=self.around.special)]
        return Piece([*self.around.before, *ids, *self.around.after])

    def number(self, voice: str) -> int | None:
        return None


def read_voices(options: Mapping[str, Any], speakers: int) -> list[str]:
    """As many names as there are speakers. Raises `ModelError` for options that name another number."""
    names = options.get("voices") or [str(number) for number in range(max(speakers, 1))]
    if len(names) != max(speakers, 1) or len(set(names)) != len(names):
        raise ModelError(f"voices must be {speakers} different names")
    return list(names)
