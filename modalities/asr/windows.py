"""A recording that arrives in pieces becomes windows that the encoder can take whole, cut where it is quiet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

FRAME = 320
"""Samples whose loudness is measured together: 20 ms."""
PAUSE = 10
"""Frames that a cut is judged by: 200 ms, about the gap between two words."""
TAIL = 3
"""A cut lies in the last third of a window."""
SILENCE = 10.0 ** (-70 / 20)
"""Root mean square of a frame below which nothing is heard: ten steps of a 16-bit recording."""


@dataclass(frozen=True)
class Window:
    """`samples` from sample `start` of the recording on."""

    start: int
    samples: np.ndarray

    @property
    def silent(self) -> bool:
        """Whether no frame of it could be heard."""
        return bool(measure_power(self.samples).max() < SILENCE**2)


class Cutter:
    """Cuts windows of at most `longest` samples; holds no more than one window and one piece."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.position = 0
        """Samples that are cut off already."""
        self.complete = False
        self._held = np.empty(0, np.float32)

    def push(self, samples: np.ndarray, last: bool) -> Iterator[Window]:
        """The windows that are certain now. With `last`, whatever is left is one as well."""
        self._held = np.concatenate([self._held, samples])
        while len(self._held) > self.longest:
            yield self._cut(find_pause(self._held[: self.longest]))
        if last:
            self.complete = True
            if len(self._held):
                yield self._cut(len(self._held))

    def _cut(self, count: int) -> Window:
        window = Window(self.position, self._held[:count])
        self._held = self._held[count:]
        self.position += count
        return window


def find_pause(samples: np.ndarray) -> int:
    """The middle of the quietest 200 ms in the last third; of equally quiet ones the latest."""
    power = measure_power(samples)
    first = len(power) - len(power) // TAIL
    width = min(PAUSE, max(1, len(power) - first))
    loudness = np.convolve(power[first:], np.ones(width, np.float32), "valid")
    quietest = len(loudness) - 1 - int(loudness[::-1].argmin())
    return min(len(samples), (first + quietest) * FRAME + width * FRAME // 2)


def measure_power(samples: np.ndarray) -> np.ndarray:
    """Mean square of every frame, the last one possibly short: (ceil(n / FRAME),) float32."""
    padded = np.pad(samples, (0, -len(samples) % FRAME))
    return np.square(padded).reshape(-1, FRAME).mean(axis=1)
