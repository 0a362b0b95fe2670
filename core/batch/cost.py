"""What a stage's launches cost, learned from those that were collected.

A decode step of a few tokens and a prompt of thousands differ by what every launch reads (the weights), so one price
per token would be wrong for both: launches of short steps alone teach what a launch costs anyhow, the others what a
unit of long work adds to it. Stages without short steps (encoders, whose every row is long) tell the two apart by
launches of different sizes; with a price alone, launches that were cut to one row would seem to allow no more than one.
"""

from __future__ import annotations

NEWS = 0.2
"""How much the latest launch counts."""

SURPRISE = 3.0
"""A launch that took so many times what was to be expected (a kernel was compiled, a graph recorded) counts as no
more than that."""

DARED = 2
"""So many times as large as they were a launch may be, to find out what a unit adds: while all were of one size, and
there are no short steps."""

BRIEF = 1.5
"""Only where those took no more than so many times what the launch may."""

SPREAD = 0.05
"""Launches whose sizes deviate by less, as a part of their mean, are of one size."""

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
        self._short = False
        """Whether there are short steps."""
        self._mean = (0.0, 0.0)
        """Units and milliseconds of a launch, on average, of late."""
        self._spread = (0.0, 0.0)
        """The variance of units, and their covariance with milliseconds."""
        self._told = False
        """Whether they tell a unit's price from the rest."""

    def learn(self, long: int, ms: float) -> None:
        """A launch with so many units of long work took `ms`."""
        self._launches += 1
        if self._launches > TRUSTED and (self.price or not long):
            ms = min(ms, SURPRISE * (self.base + self.price * long))
        if not long:
            self.base += (ms - self.base) * (NEWS if self._short else 1.0)
            units, average = self._mean
            if not self._short and units:
                self.price = average / units  # too much, until it is learned: streams must not wait for a guess
            self._short = True
        elif not self._short:
            self._fit(long, ms)
        else:
            price = max(ms - self.base, 0.0) / long
            self.price += (price - self.price) * (NEWS if self.price else 1.0)

    def _fit(self, long: int, ms: float) -> None:
        """A line through the launches of late: what they cost anyhow, and a unit's price."""
        news = max(NEWS, 1 / self._launches)
        units, average = self._mean
        more, longer = long - units, ms - average
        self._mean = units, average = units + news * more, average + news * longer
        variance, covariance = self._spread
        variance = (1 - news) * (variance + news * more * more)
        covariance = (1 - news) * (covariance + news * more * longer)
        self._spread = variance, covariance
        self._told = variance > (SPREAD * units) ** 2
        slope = covariance / variance if self._told else average / units
        self.price = min(max(slope, 0.0), average / units)
        self.base = average - self.price * units

    def units_within(self, ms: float) -> float:
        """Units of long work that a launch of `ms` has room for; without bound while nothing is known."""
        if not self.price:
            return float("inf")
        within = (ms - self.base) / self.price
        units, average = self._mean
        dares = not (self._short or self._told) and average <= BRIEF * ms
        return max(within, DARED * units) if dares else within

    def milliseconds(self, long: int) -> float:
        """What a launch with so many units of long work takes; 0 while nothing is known."""
        return self.base + self.price * long
