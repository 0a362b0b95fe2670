"""Another pace at the same pitch, for voices that know only one: FFmpeg's `atempo` (WSOLA), piece by piece."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.speech.telling import Teller

if TYPE_CHECKING:
    from polymux.core.engine.job import Job
    from polymux.core.engine.site import Site
    from polymux.core.tasks import SpokenWord

SLOWEST, FASTEST = 0.5, 2.0
"""What one filter does well: slower it cannot, and faster it leaves samples out. Beyond that it takes two."""

SILENCE = 0.25
"""Seconds behind a sound: more than the windows of all its filters together."""


class Stretcher:
    """One sound's filter. What comes out is `round(samples in / pace)` samples long, to the sample."""

    def __init__(self, rate: int, pace: float) -> None:
        import av.filter  # only whoever asks for another pace needs it

        self._rate = rate
        self._pace = pace
        self._taken = 0
        self._given = 0
        graph = av.filter.Graph()
        source = graph.add_abuffer(sample_rate=rate, format="flt", layout="mono")
        filters = [graph.add("atempo", f"tempo={tempo:.6f}") for tempo in split_pace(pace)]
        sink = graph.add("abuffersink")
        chain = [source, *filters, sink]
        for before, after in itertools.pairwise(chain):
            before.link_to(after)
        graph.configure()
        self._graph = graph  # the filters do not keep it alive
        self._source, self._sink = source, sink

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """float32 in and out, what is ready."""
        if not len(samples):
            return np.zeros(0, np.float32)
        self._push(samples)
        self._taken += len(samples)
        return self._pull()

    def finish(self) -> np.ndarray:
        """What was held back. The filter keeps what fills no window of its own, so silence follows, and is cut off."""
        self._push(np.zeros(round(SILENCE * self._rate), np.float32))
        self._source.push(None)
        rest = self._pull()
        missing = round(self._taken / self._pace) - self._given
        self._given += missing
        return np.pad(rest, (0, missing))

    def _push(self, samples: np.ndarray) -> None:
        from av.audio.frame import AudioFrame

        frame = AudioFrame.from_ndarray(np.ascontiguousarray(samples[None], np.float32), format="flt", layout="mono")
        frame.sample_rate = self._rate
        frame.pts = self._taken
        self._source.push(frame)

    def _pull(self) -> np.ndarray:
        import av

        parts: list[np.ndarray] = []
        while True:
            try:
                frame: Any = self._sink.pull()
            except (av.error.BlockingIOError, av.error.EOFError):
                break
            parts.append(frame.to_ndarray()[0])
        joined = np.concatenate(parts) if parts else np.zeros(0, np.float32)
        room = max(round(self._taken / self._pace) - self._given, 0)
        joined = joined[:room]
        self._given += len(joined)
        return joined


def stretch(samples: np.ndarray, rate: int, pace: float) -> np.ndarray:
    """A whole sound at another pace, float32: `round(samples / pace)` long."""
    if pace == 1.0:
        return samples
    stretcher = Stretcher(rate, pace)
    return np.concatenate([stretcher.feed(samples), stretcher.finish()])


def share_pace(pace: float, fastest: float) -> tuple[float, float]:
    """What a voice that speaks at up to `fastest` does of a pace by itself, and what its sound is stretched by then."""
    own = min(pace, fastest)
    return own, pace / own


def split_pace(pace: float) -> list[float]:
    """Factors that one filter can do each; together they are the pace."""
    factors: list[float] = []
    while pace < SLOWEST:
        factors.append(SLOWEST)
        pace /= SLOWEST
    while pace > FASTEST:
        factors.append(FASTEST)
        pace /= FASTEST
    return [*factors, pace]


@dataclass(frozen=True)
class Stretch:
    """The next samples for a filter; None: no more will come."""

    stretcher: Stretcher
    samples: np.ndarray | None


class StretchModel(OneShotModel):
    def forward(self, items: list[Stretch], slabs: list[torch.Tensor]) -> list[np.ndarray]:
        return [
            item.stretcher.finish() if item.samples is None else item.stretcher.feed(item.samples) for item in items
        ]


def make_stretch_stage(site: Site) -> OneShotStage:
    """Filters run beside the device."""
    return OneShotStage("stretch", StretchModel(), site, max_units=8, on_host=True)


class PacedTeller:
    """Tells sound at another pace than it was made at."""

    def __init__(self, job: Job, teller: Teller, stage: OneShotStage, pace: float) -> None:
        self._job = job
        self._teller = teller
        self._stage = stage
        self._pace = pace
        self._stretcher = Stretcher(teller.rate, pace) if pace != 1.0 else None

    @property
    def plain(self) -> bool:
        """Sound is told as it is: int16 samples will do."""
        return self._stretcher is None

    def expect(self, words: Iterable[SpokenWord]) -> None:
        """Words of this piece, at the times that they are made at."""
        self._teller.expect(words, self._pace)

    async def tell(self, samples: np.ndarray) -> None:
        """float32; or int16, if `plain`."""
        self._teller.tell(samples if self._stretcher is None else await self._stretch(samples))

    async def finish(self) -> None:
        """No more of this piece will come."""
        if self._stretcher is not None:
            self._teller.tell(await self._stretch(None))

    async def _stretch(self, samples: np.ndarray | None) -> np.ndarray:
        if self._stretcher is None:
            raise RuntimeError("nothing to stretch with")
        row = await self._job.start(self._stage, OneShotRow(self._job, Stretch(self._stretcher, samples), 1))
        return row.result
