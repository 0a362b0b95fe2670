"""The device-free half: text becomes pieces of phonemes, sound becomes answers."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
from hibari.g2p import G2P

from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Done, Sound, Speak
from polymux.core.text.sentences import cut_text, split_sentences
from polymux.core.text.voices import choose_voice
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux_hibari.work import RATE, SPOKEN, Piece, SpeakWork, Spoken

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LONGEST = 240
"""Phonemes of one piece, some twelve seconds of speech: the model was trained on sentences, and others wait for it."""

FIRST = 100
"""Phonemes of an answer's first piece: sound shall be heard soon."""

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
        accents = {british: G2P(british=british) for british in {voice["british"] for voice in voices.values()}}
        for reader in accents.values():
            reader(UNKNOWN)
        return cls(vocabulary, {name: accents[voice["british"]] for name, voice in voices.items()})

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Reads up to the first piece, so that a text without anything to say is refused; the rest is read as the
        engine speaks."""
        if not isinstance(ask, Speak):
            raise InvalidRequest(f"This model does not serve {task}.")
        if not (math.isfinite(ask.speed) and 0.25 <= ask.speed <= 4.0):
            raise InvalidRequest("speed must be from 0.25 to 4", param="speed")
        voice = choose_voice(ask.voice, self.voices)
        pieces = self.read(ask.text, voice)
        first = next(pieces, None)
        if first is None:
            raise InvalidRequest("nothing in input can be spoken: this voice reads English", param="input")
        return Prepared(SpeakWork(voice, ask.speed), messages=itertools.chain([first], pieces, [Piece([])]))

    def read(self, text: str, voice: str) -> Iterator[Piece]:
        """The text's pieces, none of them empty. What the voice has no sound for (other scripts, emoji) is silent."""
        read = self.readers[voice]
        room = FIRST
        for sentence in split_sentences(text):
            phonemes = read_aloud(read, " ".join(sentence.split()))
            for part in cut_phonemes(phonemes, room):
                ids = [self.vocabulary[phoneme] for phoneme in part if phoneme in self.vocabulary]
                if ids:
                    yield Piece([PAD, *ids, PAD])
                    room = LONGEST

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return SpeechPresenter()

    def describe(self) -> dict[str, Any]:
        return {"sample_rate": RATE, "voices": list(self.voices), "languages": ["en"]}


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


class SpeechPresenter(Presenter):
    """Counts what was said while it passes on the sound."""

    def __init__(self) -> None:
        self._samples = 0

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == SPOKEN:
                samples = unpack(body, Spoken).samples
                self._samples += len(samples)
                return [Sound(samples.astype("<i2", copy=False).tobytes(), RATE)]
            case Ended(receipt=receipt):
                usage = Usage(receipt.input_units, receipt.output_units, seconds=self._samples / RATE)
                return [Done(usage, receipt)]
        return []
