"""Where one window after another begins: by the timestamps that were said (Radford et al. 2022, section 3.8)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from polymux.core.engine.job import Job
from polymux.core.engine.wire import unpack
from polymux.modalities.asr.tokens import STAMP_SECONDS
from polymux.modalities.asr.utterances import RATE
from polymux.modalities.asr.work import AudioChunk

STAMP = round(STAMP_SECONDS * RATE)
"""Samples from one timestamp to the next."""

LEAST = RATE
"""Samples that the rest of a window must have to be heard, and those before it, so that there is an end to it."""


@dataclass(frozen=True)
class Stride:
    """What counts of a window's tokens, and how many samples later the next window begins."""

    tokens: list[int]
    samples: int


def find_stride(tokens: list[int], first_stamp: int, count: int) -> Stride:
    """For a window of `count` samples; `tokens` are without the end.

    Two timestamps in a row close a segment: what comes after the last pair was cut off by the window's end, and is
    heard again from there. A single timestamp at the end says that nothing follows it; without any pair the window
    counts as one segment.
    """
    stamped = [token >= first_stamp for token in tokens]
    pairs = [place for place in range(1, len(tokens)) if stamped[place - 1] and stamped[place]]
    if not pairs or stamped[-2:] == [False, True]:
        return Stride(tokens, count)
    last = pairs[-1]
    return Stride(tokens[:last], min(count, max(1, tokens[last - 1] - first_stamp) * STAMP))


def find_rest(tokens: list[int], first_stamp: int, count: int) -> Stride | None:
    """Where a window that was cut by voice activity must be heard again: its tokens end in a pair, so what follows was
    not written down, and that is long enough to hold speech. Else None."""
    if len(tokens) < 2 or min(tokens[-2:]) < first_stamp:
        return None
    found = find_stride(tokens, first_stamp, count)
    return found if LEAST <= found.samples <= count - LEAST else None


class Source:
    """A recording that arrives in the job's inbox, read in windows that may overlap."""

    def __init__(self, job: Job) -> None:
        self.position = 0
        """Samples before the next window."""
        self._job = job
        self._held = np.empty(0, np.float32)
        self._complete = False

    async def read(self, count: int) -> np.ndarray:
        """The next `count` samples, fewer at the end; they stay until `advance`."""
        while len(self._held) < count and not self._complete:
            chunk = unpack(await self._job.receive(), AudioChunk)
            self._held = np.concatenate([self._held, chunk.samples])
            self._complete = chunk.last
        return self._held[:count].copy()

    def advance(self, count: int) -> None:
        self._held = self._held[count:].copy()
        self.position += count
