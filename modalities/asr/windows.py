"""A recording that arrives in pieces becomes windows that the encoder can take whole, cut where nobody speaks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from polymux.modalities.asr.utterances import RATE, Edge, Endpointing, Utterances

FRAME = 320
"""Samples whose loudness is measured together: 20 ms."""
PAUSE = 10
"""Frames that a cut is judged by: 200 ms, about the gap between two words."""
TAIL = 3
"""A cut lies in the last third of a window."""
REST = 5.0
"""Seconds nobody speaks after which what follows is a window of its own."""


@dataclass(frozen=True)
class Window:
    """`samples` from sample `start` of the recording on."""

    start: int
    samples: np.ndarray


class SpeechCutter:
    """Windows of at most `longest` samples that hold all that was said; what nobody says anything in is left out.

    Holds no more than two windows and one piece.
    """

    def __init__(self, longest: int, endpointing: Endpointing) -> None:
        self.longest = longest
        self.position = 0
        """Samples that were pushed."""
        self._utterances = Utterances(endpointing)
        self._held = np.empty(0, np.float32)
        self._start: int | None = None
        """Where the window begins that is being filled; None while nobody speaks."""
        self._end = 0
        """Where its last utterance ended."""

    def push(self, samples: np.ndarray, probabilities: np.ndarray, *, last: bool) -> Iterator[Window]:
        """The windows that are certain now. `probabilities` are those of the frames that the samples complete."""
        self._held = np.concatenate([self._held, samples]) if len(self._held) else samples
        self.position += len(samples)
        for edge in self._utterances.feed(probabilities):
            yield from self._take(edge)
        if last:
            for edge in self._utterances.finish(self.position):
                yield from self._take(edge)
        elif self._utterances.speaking:
            yield from self._cut(self._utterances.position)
        rested = last or self._utterances.position - self._end > REST * RATE
        if self._start is not None and not self._utterances.speaking and rested:
            yield self._close(self._end)
            self._start = None
        self._forget()

    def _take(self, edge: Edge) -> Iterator[Window]:
        if not edge.begins:
            self._end = edge.position
            yield from self._cut(edge.position)
        elif self._start is None:
            self._start = edge.position
        elif edge.position - self._end > REST * RATE:
            yield self._close(self._end)
            self._start = edge.position

    def _cut(self, position: int) -> Iterator[Window]:
        """Whole windows of what is said until `position`."""
        while self._start is not None and position - self._start > self.longest:
            first = self._start - self._origin
            yield self._close(self._start + find_pause(self._held[first : first + self.longest]))

    def _close(self, end: int) -> Window:
        """The window from `_start` to `end`; the next begins there."""
        start, origin = self._start or 0, self._origin
        self._start = end
        return Window(start, self._held[start - origin : end - origin])

    @property
    def _origin(self) -> int:
        return self.position - len(self._held)

    def _forget(self) -> None:
        """What no window can hold any more: an utterance may begin a padding before it is noticed, no earlier."""
        needed = self._utterances.earliest if self._start is None else self._start
        self._held = self._held[max(0, needed - self._origin) :].copy()


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
