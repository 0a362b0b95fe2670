"""The sound of one utterance while it lasts: pushed by who hears it, taken by who writes it down."""

from __future__ import annotations

import numpy as np

from polymux.core.batch.row import Signal
from polymux.modalities.asr.windows import find_pause


class Utterance:
    """Sound from sample `start` of the stream on; lengths count from there."""

    def __init__(self, index: int, start: int) -> None:
        self.index = index
        self.start = start
        self.cut = 0
        """So much of it was taken."""
        self.voiced = 0
        """Its length up to where speech was last heard; 0: nobody has spoken."""
        self.quiet = False
        """Nothing was said for a moment: it may be over."""
        self.complete = False
        self.abandoned = False
        self._pieces: list[np.ndarray] = []
        self._held = 0
        self._changed = Signal()

    @property
    def length(self) -> int:
        return self.cut + self._held

    @property
    def held(self) -> int:
        """Samples that were not taken yet."""
        return self._held

    @property
    def spent(self) -> bool:
        """It is complete, and all of it was taken."""
        return self.complete and not self._held

    def read(self) -> np.ndarray:
        """What was not taken yet."""
        if len(self._pieces) != 1:
            self._pieces = [np.concatenate([np.empty(0, np.float32), *self._pieces])]
        return self._pieces[0]

    def push(self, samples: np.ndarray, *, voiced: bool) -> None:
        self._pieces.append(samples)
        self._held += len(samples)
        if voiced:
            self.voiced, self.quiet = self.length, False
        self._changed.set()

    def hush(self) -> None:
        self.quiet = True
        self._changed.set()

    def close(self, length: int | None = None) -> None:
        """It is complete; of what was pushed, the first `length` samples belong to it."""
        if length is not None and length < self.length:
            self._keep(self.read()[: max(length - self.cut, 0)])
        self.complete = True
        self._changed.set()

    def abandon(self) -> None:
        """Nobody wants to know any more."""
        self.abandoned = self.complete = True
        self._keep(np.empty(0, np.float32))
        self._changed.set()

    def take(self, longest: int) -> np.ndarray | None:
        """What nothing is added to: the rest of a complete utterance, or up to `longest` samples of a long one, cut
        at a pause. None while there is none."""
        if self._held <= longest and not self.complete:
            return None
        held = self.read()
        count = find_pause(held[:longest]) if len(held) > longest else len(held)
        self._keep(held[count:])
        self.cut += count
        return held[:count]

    def wake(self) -> None:
        """Who waits for a change shall look around, although there is none."""
        self._changed.set()

    async def changed(self) -> None:
        """Wait until something was pushed, or it got quiet or complete."""
        await self._changed
        self._changed = Signal()

    def _keep(self, samples: np.ndarray) -> None:
        self._pieces, self._held = [samples], len(samples)
