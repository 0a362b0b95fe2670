"""Probabilities of speech become utterances: where one begins, and where it has ended for long enough."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import numpy as np

RATE = 16_000
FRAME = 512
"""Samples that one probability is about: 32 ms."""

HYSTERESIS = 0.15
"""How far below the threshold speech must fall to count as silence."""


class Endpointing(msgspec.Struct, frozen=True, omit_defaults=True):
    """When speech counts as begun and ended. Times are in seconds."""

    threshold: float = 0.5
    silence: float = 0.5
    """So long nobody speaks before an utterance is over."""
    padding: float = 0.4
    """Sound that is kept before an utterance and, up to the silence waited for, behind it."""
    shortest: float = 0.1
    """What is shorter is no speech: a click, a cough."""


@dataclass(frozen=True)
class Edge:
    """An utterance begins (or ends) at sample `position` of the recording, padding included."""

    begins: bool
    position: int


class Utterances:
    """Edges alternate, and their positions never go back."""

    def __init__(self, endpointing: Endpointing) -> None:
        self.position = 0
        """Samples that were judged."""
        self.speaking = False
        """Between an edge that begins and one that ends."""
        self._settings = endpointing
        self._since: int | None = None
        """Where what may be an utterance begins."""
        self._quiet: int | None = None
        """Where what may be its end begins."""
        self._floor = 0

    @property
    def silence(self) -> int:
        """Samples since an utterance that may end was last heard; 0 while somebody speaks."""
        return 0 if self._quiet is None else self.position - self._quiet

    @property
    def earliest(self) -> int:
        """No edge will have a smaller position."""
        since = self.position if self._since is None else self._since
        return max(self._floor, since - self._samples(self._settings.padding))

    def retune(self, endpointing: Endpointing) -> None:
        """What counts from here on."""
        self._settings = endpointing

    def reset(self) -> None:
        """Whatever is being said begins anew, with the next frame."""
        self.speaking = False
        self._since = self._quiet = None
        self._floor = self.position

    def feed(self, probabilities: np.ndarray) -> Iterator[Edge]:
        """The edges that are certain after these frames, in order."""
        probabilities = probabilities.astype(np.float64)
        place = 0
        while place < len(probabilities):
            quiet = self._count_idle(probabilities[place:])
            self.position += quiet * FRAME
            place += quiet
            if place < len(probabilities):
                yield from self._judge(float(probabilities[place]))
                self.position += FRAME
                place += 1

    def _count_idle(self, probabilities: np.ndarray) -> int:
        """Frames that change nothing: the silence before speech, and speech that goes on."""
        if self.speaking and self._quiet is None:
            changes = probabilities < self._settings.threshold - HYSTERESIS
        elif not self.speaking and self._since is None:
            changes = probabilities >= self._settings.threshold
        else:
            return 0
        first = int(changes.argmax())
        return first if changes[first] else len(changes)

    def finish(self, length: int) -> Iterator[Edge]:
        """The recording ends, after `length` samples: so does what is being said."""
        if self._since is not None and not self.speaking and self._long_enough(length):
            yield self._begin()
        if self.speaking:
            end = length if self._quiet is None else min(length, self._quiet + self._samples(self._settings.padding))
            yield self._end(end)

    def _judge(self, probability: float) -> Iterator[Edge]:
        loud = probability >= self._settings.threshold
        if loud:
            self._quiet = None
            if self._since is None:
                self._since = self.position
        if self._since is None:
            return
        if loud and not self.speaking and self._long_enough(self.position + FRAME):
            yield self._begin()
        if not loud and self._quiet is None and probability < self._settings.threshold - HYSTERESIS:
            self._quiet = self.position
        if self._quiet is None:
            return
        if not self.speaking:
            self._since = self._quiet = None
        elif self.position + FRAME - self._quiet >= self._samples(self._settings.silence):
            padding = min(self._settings.padding, self._settings.silence)
            yield self._end(self._quiet + self._samples(padding))

    def _begin(self) -> Edge:
        self.speaking = True
        start = (self._since or 0) - self._samples(self._settings.padding)
        self._floor = max(start, self._floor)
        return Edge(True, self._floor)

    def _end(self, position: int) -> Edge:
        self.speaking = False
        self._since = self._quiet = None
        self._floor = max(position, self._floor)
        return Edge(False, self._floor)

    def _long_enough(self, position: int) -> bool:
        return self._since is not None and position - self._since >= self._samples(self._settings.shortest)

    @staticmethod
    def _samples(seconds: float) -> int:
        return round(seconds * RATE)
