"""The device-free half: text becomes pieces of phonemes, sound becomes answers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from hibari.g2p import G2P
from hibari.g2p.oov import ASSETS, OOV

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.speech.presenter import SpeechPresenter
from polymux.core.speech.script import Pause, Say, Script, read_script
from polymux.core.speech.telling import split_words
from polymux.core.tasks import Speak
from polymux.core.text.sentences import cut_text, split_sentences
from polymux.core.text.voices import choose_voice
from polymux_hibari.work import RATE, Piece, SpeakWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LONGEST = 240
"""Phonemes of one piece, some twelve seconds of speech: the model was trained on sentences, and others wait for it."""

FIRST = 100
"""Phonemes of an answer's first piece: sound shall be heard soon."""

READ_AT_ONCE = 1000
"""Characters that the package is given at most: a run of marks takes it time by the square of its length."""

PAD = 0
"""The id at both ends of what the model is given."""

UNKNOWN = "Hibarilectual"
"""No lexicon has it: reading it once loads what unknown words are read with."""


class SpeechFront(Front):
    """`vocabulary`: phoneme -> id. `readers`: voice -> what turns text into its phonemes."""

    def __init__(self, vocabulary: Mapping[str, int], readers: Mapping[str, G2P]) -> None:
        self.vocabulary = vocabulary
        self.readers = readers
        self.voices = tuple(readers)

    @classmethod
    def load(cls, files: ModelFiles) -> SpeechFront:
        """Raises `ModelError` when the folder has no vocabulary or no voice."""
        voices = files.config().get("voices")
        vocabulary = files.json("vocab.json")
        if not voices or not vocabulary:
            raise ModelError(f"{files.reference}: config.json names no voices, or vocab.json is missing")
        accents = {british: open_reader(british) for british in {voice["british"] for voice in voices.values()}}
        for reader in accents.values():
            reader(UNKNOWN)
        return cls(vocabulary, {name: accents[voice["british"]] for name, voice in voices.items()})

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Reads up to the first piece, so that a text without anything to say is refused; the rest is read as the
        engine speaks."""
        if not isinstance(ask, Speak):
            raise InvalidRequest(f"This model does not serve {task}.")
        voice = choose_voice(ask.voice, self.voices)
        script = list(read_script(ask))
        self._check_phonemes(script)
        pieces = self.read(script, voice)
        begun: list[Piece] = []
        for piece in pieces:
            begun.append(piece)
            if piece.ids:
                break
        else:
            raise InvalidRequest("nothing in input can be spoken: this voice reads English", param="input")
        return Prepared(SpeakWork(voice), messages=itertools.chain(begun, pieces, [Piece(last=True)]))

    def _check_phonemes(self, script: Script) -> None:
        """Who writes phonemes means each of them."""
        written = {phoneme for part in script if isinstance(part, Say) and part.phonemes for phoneme in part.text}
        if strange := sorted(each for each in written - self.vocabulary.keys() if not each.isspace()):
            raise InvalidRequest(f"no phonemes of this voice: {' '.join(strange[:8])}", param="input")

    def read(self, script: Script, voice: str) -> Iterator[Piece]:
        """Pieces and pauses in order, none empty. What the voice has no sound for (other scripts, emoji) is silent."""
        room = FIRST
        for part in script:
            if isinstance(part, Pause):
                if part.seconds:
                    yield Piece(pause=part.seconds)
                continue
            sentences = (cut_text(sentence, READ_AT_ONCE) for sentence in split_sentences(part.text))
            for sentence in itertools.chain.from_iterable(sentences):
                phonemes = sentence.strip() if part.phonemes else self._read_aloud(sentence, voice)
                for sounds, text in cut_beside(phonemes, sentence, room):
                    ids = [self.vocabulary[phoneme] for phoneme in sounds if phoneme in self.vocabulary]
                    if ids:
                        yield Piece([PAD, *ids, PAD], text, part.pace)
                        room = LONGEST

    def _read_aloud(self, sentence: str, voice: str) -> str:
        return read_aloud(self.readers[voice], " ".join(sentence.split()))

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return SpeechPresenter(RATE)

    def describe(self) -> dict[str, Any]:
        return {"sample_rate": RATE, "voices": list(self.voices), "languages": ["en"]}


def open_reader(british: bool) -> G2P:
    return G2P(oov=WholeWords(OOV(os.path.join(ASSETS, "oov_gb.onnx")) if british else OOV()), british=british)


class WholeWords:
    """Reads words that no lexicon has. The network takes so many letters and forgets the others: a longer word is read
    in parts."""

    def __init__(self, network: OOV) -> None:
        self.network = network

    def __call__(self, word: str) -> str | None:
        most = self.network.maxlen
        count = -(-len(word) // most)
        parts = [word[len(word) * part // count : len(word) * (part + 1) // count] for part in range(count)]
        return "".join(filter(None, map(self.network, parts))) or None


def read_aloud(read: Callable[[str], str], text: str) -> str:
    """The text's phonemes. The package trips over rare characters and numbers of thousands of digits: what it cannot
    read is halved until the culprit is alone, and that one is silent."""
    text = text.strip()
    try:
        return read(text)
    except Exception:
        if len(text) < 2:
            return ""
    middle = text.rfind(" ", 0, len(text) // 2 + 1) + 1 or len(text) // 2
    return f"{read_aloud(read, text[:middle])} {read_aloud(read, text[middle:])}".strip()


def cut_phonemes(phonemes: str, first: int) -> Iterable[str]:
    """At most `first` of them, then at most `LONGEST` at a time."""
    head = cut_text(phonemes, first)[0] if phonemes else ""
    return [head, *cut_text(phonemes[len(head) :], LONGEST)]


def cut_beside(phonemes: str, text: str, first: int) -> Iterator[tuple[str, str]]:
    """The parts that phonemes are cut into, each with its share of the text they are read from, in whole words."""
    parts = [part for part in cut_phonemes(phonemes, first) if part]
    words = split_words(text) if text else []
    told, heard = 0, 0
    for part in parts:
        heard += len(part)
        end = len(words) if heard == len(phonemes) else round(len(words) * heard / len(phonemes))
        yield part, "".join(words[told:end])
        told = max(told, end)
