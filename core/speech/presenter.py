"""Sound from the engine becomes the answers of `speak`."""

from __future__ import annotations

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Presenter
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Done, Sound
from polymux.core.vocabulary import Ended, Event, Output, Usage


class SpeechPresenter(Presenter):
    """`rate`: samples a second of the voice."""

    def __init__(self, rate: int) -> None:
        self._rate = rate

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == SPOKEN:
                spoken = unpack(body, Spoken)
                return [Sound(spoken.samples.astype("<i2", copy=False).tobytes(), self._rate, spoken.words)]
            case Ended(receipt=receipt):
                usage = Usage(receipt.input_units, receipt.output_units, seconds=receipt.sound_seconds)
                return [Done(usage, receipt)]
        return []
