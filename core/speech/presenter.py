"""Sound from the engine becomes the answers of `speak`."""

from __future__ import annotations

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Presenter
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Done, Sound
from polymux.core.vocabulary import Ended, Event, Output, Usage

HEAD = 0.25
"""Seconds of a first stretch: a voice may tell a whole sentence at once, and encoding all of it takes time."""


class SpeechPresenter(Presenter):
    """`rate`: samples a second of the voice."""

    def __init__(self, rate: int) -> None:
        self._rate = rate
        self._begun = False

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == SPOKEN:
                spoken = unpack(body, Spoken)
                parts = [spoken] if self._begun else behead(spoken, round(HEAD * self._rate), HEAD)
                self._begun = True
                return [
                    Sound(part.samples.astype("<i2", copy=False).tobytes(), self._rate, part.words) for part in parts
                ]
            case Ended(receipt=receipt):
                usage = Usage(receipt.input_units, receipt.output_units, seconds=receipt.sound_seconds)
                return [Done(usage, receipt)]
        return []


def behead(spoken: Spoken, samples: int, seconds: float) -> list[Spoken]:
    """The first samples of a sound's beginning, and the rest, if there is more than as much again; each with the words
    that begin in it."""
    if len(spoken.samples) < 2 * samples:
        return [spoken]
    begun = sum(word.start < seconds for word in spoken.words)
    return [
        Spoken(spoken.samples[:samples], spoken.words[:begun]),
        Spoken(spoken.samples[samples:], spoken.words[begun:]),
    ]
