"""The engine half of VITS: each piece of text is read, flows once, and is told window by window."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import Tensor
from transformers import VitsModel

from polymux.core.batch.oneshot import OneShotRow, OneShotStage, Parted
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux.core.speech.stretch import PacedTeller, make_stretch_stage, share_pace
from polymux.core.speech.telling import Teller
from polymux.core.tasks import SpokenWord
from polymux.modalities.tts.vits import ROWS, Expansion, Utterance, VitsFlow, VitsReader
from polymux.modalities.tts.vits_vocoder import LatentWindow, VitsVocoder
from polymux.modalities.tts.work import Piece, SpeakWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

FASTEST = 2.0
"""The model's own pace, at most: a sound lasts a whole frame at least. What is faster is stretched."""

LONGEST = 120.0
"""Seconds of one piece; a model that wants more has gone astray."""


@dataclass(frozen=True)
class Windowing:
    """How long the windows of an utterance are, in frames or in seconds."""

    turns: tuple[float, ...]
    """The first window, small so that sound is heard soon, the next, and so on; the last counts for all others."""
    sizes: tuple[float, ...]
    """The rest of an utterance is one window of the smallest of these that it fits in."""
    context: int = 0
    """Frames around a window that it is computed from, where passes are shared: there every window has one of the sizes
    with all of its context, unless the utterance is shorter than the smallest."""

    def count(self, second: float, context: int = 0) -> Windowing:
        """The same in frames, of which a second has so many."""
        turns, sizes = (tuple(max(round(size * second), 1) for size in sizes) for sizes in (self.turns, self.sizes))
        return Windowing(turns, sizes, context)

    def split(self, frames: int) -> Iterator[tuple[int, int]]:
        """Where each window begins, and its frames; the last may reach behind the end."""
        start = 0
        sizes = [size for size in self.sizes if size + self.context <= frames] or self.sizes[:1]
        for turn in chain(self.turns, repeat(self.turns[-1])):
            if start >= frames:
                return
            size = min((size for size in sizes if size >= frames - start), default=sizes[-1])
            size = min(size, max(size for size in sizes if size <= turn))
            yield int(start), int(size)
            start += int(size)


HOST_WINDOWS = Windowing((0.25, 0.5, 1.0, 2.0), (0.25, 0.5, 1.0, 2.0))
"""On a CPU: sound comes little faster than it is played, and others get their turn between two windows."""

CARD_WINDOWS = Windowing((0.25, 1.0, 6.0), (0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0))
"""On a card: what windows compute twice, their halos, costs more than what they wait for."""

PASS_SECONDS = 156.0
"""Of sound in a pass on a card, halos included: 24 windows of the longest, with those of MMS."""


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
        windows: Windowing,
        measure: Callable[[LatentWindow], int],
    ) -> None:
        """`hop`: samples of a frame. `windows`: in frames. `measure`: frames that a window is computed from."""
        self.work = {"speak": SpeakWork}
        self.reader = reader
        self.flow = flow
        self.vocoder = vocoder
        self.stretch = stretch
        self.stages = (reader, flow, vocoder, stretch)
        self.rate = rate
        self.hop = hop
        self.windows = windows
        self.measure = measure

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
        read: Parted = await self._pass(job, self.reader, utterance, len(utterance.ids))
        frames = self._count(read.host)
        teller.expect(self._time(piece, read.host.tolist()))
        latents = await self._pass(job, self.flow, Expansion(utterance, read.host, read.kept, frames), frames)
        # the next window may already run while this one is told
        rows: deque[OneShotRow] = deque()
        for start, size in self.windows.split(frames):
            end, usual = min(start + size, frames), size if self.windows.context else 0
            window = LatentWindow(latents, start, end, utterance.speaker, usual, rounded=teller.plain)
            rows.append(self._start(job, self.vocoder, window, self.measure(window)))
            if len(rows) > 1:
                await teller.tell((await rows.popleft()).result.numpy())
        while rows:
            await teller.tell((await rows.popleft()).result.numpy())
        await teller.finish()
        job.receipt.input_units += len(utterance.ids)
        job.receipt.output_units += frames

    async def _pass(self, job: Job, stage: OneShotStage, item: Any, size: int) -> Any:
        return (await self._start(job, stage, item, size)).result

    def _start(self, job: Job, stage: OneShotStage, item: Any, size: int) -> OneShotRow:
        row = OneShotRow(job, item, size)
        begins = not isinstance(item, LatentWindow) or item.start == 0
        row.urgent = begins and not job.receipt.sound_seconds  # others have sound to play meanwhile
        return job.start(stage, row)

    def _count(self, counts: Tensor) -> int:
        """Frames of the utterance."""
        if not torch.isfinite(counts).all():
            raise InternalError("the model's output was not finite for this request")
        frames = max(int(counts.sum()), 1)
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
    card = vocoder.rounds
    windows = CARD_WINDOWS.count(second, 2 * vocoder.halo) if card else HOST_WINDOWS.count(second)
    vocoder.usual = [round(size) for size in windows.sizes]
    # on a CPU a window fills every core by itself, and other stages get their turn between two
    units = round(PASS_SECONDS * second) if card else max(round(second), 1)
    long = 4 * units if card else max(units, 512)
    return VitsProgram(
        OneShotStage("read", reader, site, max_units=long, max_rows=ROWS[-1], to_host=True),
        OneShotStage("flow", flow, site, max_units=long, max_rows=ROWS[-1]),
        OneShotStage("vocode", vocoder, site, max_units=units, max_rows=ROWS[-1], to_host=True),
        make_stretch_stage(site),
        model.config.sampling_rate,
        vocoder.hop,
        windows,
        vocoder.measure,
    )
