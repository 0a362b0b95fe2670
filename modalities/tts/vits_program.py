"""The engine half of VITS: each piece of text is read, flows once, and is told window by window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from transformers import VitsModel

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux.core.speech.stretch import PacedTeller, make_stretch_stage, share_pace
from polymux.core.speech.telling import Teller
from polymux.core.tasks import SpokenWord
from polymux.modalities.tts.vits import Expansion, LatentWindow, Utterance, VitsFlow, VitsReader, VitsVocoder
from polymux.modalities.tts.work import Piece, SpeakWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

FIRST_SECONDS = 0.25
"""Of the first window, so that sound is heard soon; each window is twice the one before."""

MOST_SECONDS = 2.0

FASTEST = 2.0
"""The model's own pace, at most: a sound lasts a whole frame at least. What is faster is stretched."""

LONGEST = 120.0
"""Seconds of one piece; a model that wants more has gone astray."""


def list_windows(frames: int, second: float) -> Iterator[tuple[int, int]]:
    """Where the windows of an utterance begin, and their frames; the last may reach behind it. `second`: its frames."""
    size, most = max(round(FIRST_SECONDS * second), 1), max(round(MOST_SECONDS * second), 1)
    start = 0
    while start < frames:
        yield start, size
        start += size
        size = min(2 * size, most)


class VitsProgram(Program):
    """Says a text's pieces one after the other."""

    def __init__(
        self,
        reader: OneShotStage,
        flow: OneShotStage,
        vocoder: OneShotStage,
        stretch: OneShotStage,
        rate: int,
        hop: int,
    ) -> None:
        """`hop`: samples of a frame."""
        self.work = {"speak": SpeakWork}
        self.reader = reader
        self.flow = flow
        self.vocoder = vocoder
        self.stretch = stretch
        self.stages = (reader, flow, vocoder, stretch)
        self.rate = rate
        self.hop = hop

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, SpeakWork):
            raise InvalidRequest("malformed speech work")
        teller = Teller(job, self.rate)
        number = 0
        while not (piece := unpack(await job.receive(), Piece)).last:
            if piece.ids:
                seed = (work.seed + number) % (1 << 63)
                own, rest = share_pace(piece.pace, FASTEST)
                paced = PacedTeller(job, teller, self.stretch, rest)
                await self._say(job, piece, Utterance(piece.ids, work.speaker, own, seed), paced)
                number += 1
            teller.pause(piece.pause)

    async def _say(self, job: Job, piece: Piece, utterance: Utterance, teller: PacedTeller) -> None:
        read: Tensor = (await job.start(self.reader, OneShotRow(job, utterance, len(utterance.ids)))).result
        frames = self._count(read)
        teller.expect(self._time(piece, read[:, 0].tolist()))
        flown = await job.start(self.flow, OneShotRow(job, Expansion(utterance, read, frames), frames))
        for start, size in list_windows(frames, self.rate / self.hop):
            end = min(start + size, frames)
            window = LatentWindow(flown.result, start, end, utterance.speaker, size)
            heard = await job.start(self.vocoder, OneShotRow(job, window, end - start))
            await teller.tell(heard.result.numpy())
        await teller.finish()
        job.receipt.input_units += len(utterance.ids)
        job.receipt.output_units += frames

    def _count(self, read: Tensor) -> int:
        """Frames of the utterance."""
        if not torch.isfinite(read).all():
            raise InternalError("the model's output was not finite for this request")
        frames = max(int(read[:, 0].sum()), 1)
        if frames * self.hop > LONGEST * self.rate:
            raise InternalError(f"the model wants more than {LONGEST:g} seconds for one sentence")
        return frames

    def _time(self, piece: Piece, counts: list[float]) -> list[SpokenWord]:
        """When each word is heard, from the beginning of the piece."""
        ends = [0, *accumulate(counts)]
        second = self.hop / self.rate
        return [SpokenWord(word.text, ends[word.first] * second, ends[word.end] * second) for word in piece.words]

    def describe(self) -> dict[str, Any]:
        model = self.flow.model
        dtype = str(model.dtype).removeprefix("torch.") if isinstance(model, VitsFlow) else ""
        return {"dtype": dtype, "sample_rate": self.rate}


def load_vits(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> VitsProgram:
    """Raises `ModelError`."""
    try:
        model = VitsModel.from_pretrained(files.folder, dtype=read_dtype(options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a VITS model from {files.folder}: {error}") from error
    return build_vits(model.to(site.device.torch), site)


def build_vits(model: Any, site: Site) -> VitsProgram:
    """The program around a transformers `VitsModel`, which belongs to it from now on."""
    model.eval().requires_grad_(False)
    reader, flow, vocoder = VitsReader(model), VitsFlow(model), VitsVocoder(model)
    second = model.config.sampling_rate / vocoder.hop
    # on a CPU a window fills every core by itself, and other stages get their turn between two
    together = 1.0 if site.device.torch.type == "cpu" else 64 * MOST_SECONDS
    units = max(round(together * second), 1)
    # up to the first of the longest: all that follow are of its length
    vocoder.usual = [size for _, size in list_windows(round(2.5 * MOST_SECONDS * second), second)]
    return VitsProgram(
        OneShotStage("read", reader, site, max_units=max(units, 512), to_host=True),
        OneShotStage("flow", flow, site, max_units=max(units, 512)),
        OneShotStage("vocode", vocoder, site, max_units=units, to_host=True),
        make_stretch_stage(site),
        model.config.sampling_rate,
        vocoder.hop,
    )
