"""The engine half: one stage, one row for each piece of text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np
import torch
from hibari import Hibari

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.speech.stretch import share_pace, stretch
from polymux.core.speech.telling import Teller, quantize, share_words
from polymux_hibari.work import FRAME, RATE, Piece, SpeakWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

SEED = 0
"""Of the noise in consonants and breath: a piece sounds the same however often it is said, and beside whatever."""


FASTEST = 1.0
"""The voice's own pace, at most: above it, its lengths are a seventh off, and 2.2 is the most that it reaches. A sound
that is stretched is as long as asked, and understood better."""


@dataclass(frozen=True)
class Utterance:
    ids: list[int]
    voice: str
    speed: float


class VoiceModel(OneShotModel):
    """Phonemes -> int16 samples. Each voice is a network of its own, which takes one utterance at a time."""

    apart = True

    def __init__(self, voices: Mapping[str, Hibari]) -> None:
        self.voices = voices

    def forward(self, items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
        return [self.speak(item) for item in items]

    def speak(self, utterance: Utterance) -> np.ndarray:
        voice = self.voices[utterance.voice]
        own, rest = share_pace(utterance.speed, FASTEST)
        sound: np.ndarray = voice.from_ids(utterance.ids, own, np.random.default_rng(SEED))
        return quantize(stretch(sound, RATE, rest))


class SpeechProgram(Program):
    """Says a text's pieces one after the other, each told as soon as it is spoken."""

    def __init__(self, voice: OneShotStage) -> None:
        self.work = {"speak": SpeakWork}
        self.voice = voice
        self.stages = (voice,)

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, SpeakWork):
            raise InvalidRequest("malformed speech work")
        teller = Teller(job, RATE)
        while not (piece := unpack(await job.receive(), Piece)).last:
            if piece.ids:
                samples = await self._say(job, Utterance(piece.ids, work.voice, piece.pace))
                teller.expect(share_words(piece.text, len(samples) / RATE))
                teller.tell(samples)
            teller.pause(piece.pause)

    async def _say(self, job: Job, utterance: Utterance) -> np.ndarray:
        row = OneShotRow(job, utterance, 1)
        row.urgent = not job.receipt.sound_seconds  # nothing was heard yet: others have sound to play meanwhile
        await job.start(self.voice, row)
        job.receipt.input_units += len(utterance.ids) - 2
        job.receipt.output_units += len(row.result) // FRAME
        samples: np.ndarray = row.result
        return samples

    def describe(self) -> dict[str, Any]:
        return {"dtype": "int8", "sample_rate": RATE}


def load_speech(files: ModelFiles, site: Site) -> Program:
    """As many pieces at once as torch has cores to use, with one thread each: they are spoken beside the device."""
    voices = {
        name: Hibari(voice=name, model=str(files.path(voice["file"])), threads=1)
        for name, voice in files.config()["voices"].items()
    }
    return SpeechProgram(OneShotStage("voice", VoiceModel(voices), site, max_units=1, on_host=True))
