"""What a stage's launches cost, learned from those that were collected.

A decode step of a few tokens and a prompt of thousands differ by what every launch reads (the weights), so one price
per token would be wrong for both: launches of short steps alone teach what a launch costs anyhow, the others what a
unit of long work adds to it.
"""

from __future__ import annotations

NEWS = 0.2
"""How much the latest launch counts."""

SURPRISE = 3.0
"""A launch that took so many times what was to be expected (a kernel was compiled, a graph recorded) counts as no
more than that."""

TRUSTED = 8
"""Launches after which there is something to expect."""


class LaunchCost:
    """Learned from launches; knows nothing until the first."""

    def __init__(self) -> None:
        self.base = 0.0
        """Milliseconds of a launch without long work."""
        self.price = 0.0
        """Milliseconds that a unit of long work adds."""
        self._launches = 0

    def learn(self, long: int, ms: float) -> None:
        """A launch with so many units of long work took `ms`."""
        self._launches += 1
        if self._launches > TRUSTED and (self.price or not long):
            ms = min(ms, SURPRISE * (self.base + self.price * long))
        if not long:
            self.base += (ms - self.base) * (NEWS if self.base else 1.0)
        else:
            price = max(ms - self.base, 0.0) / long
            self.price += (price - self.price) * (NEWS if self.price else 1.0)

    def units_within(self, ms: float) -> float:
        """Units of long work that a launch of `ms` has room for; without bound while nothing is known."""
        return (ms - self.base) / self.price if self.price else float("inf")

    def milliseconds(self, long: int) -> float:
        """What a launch with so many units of long work takes; 0 while nothing is known."""
        return self.base + self.price * long
