"""What a stage's launches cost, learned from those that were collected: ms = fixed + unit * units.

Least squares over recent launches. A decode step of a few tokens and a prompt of thousands differ by what every
launch reads (the weights), so one price per token would be wrong for both.
"""

from __future__ import annotations

MEMORY = 0.95
"""What a launch's weight shrinks to with every later one."""

SPREAD = 0.01
"""Relative variance of sizes below which launches say nothing about the price of one more unit."""


class LaunchCost:
    """Learned from (units, milliseconds) of launches; knows nothing until the first."""

    def __init__(self) -> None:
        self.fixed = 0.0
        self.unit = 0.0
        self._weight = self._x = self._y = self._xx = self._xy = 0.0

    def learn(self, units: int, ms: float) -> None:
        self._weight = MEMORY * self._weight + 1.0
        self._x = MEMORY * self._x + units
        self._y = MEMORY * self._y + ms
        self._xx = MEMORY * self._xx + units * units
        self._xy = MEMORY * self._xy + units * ms
        x, y = self._x / self._weight, self._y / self._weight
        variance = self._xx / self._weight - x * x
        if variance > SPREAD * x * x:
            self.unit = max((self._xy / self._weight - x * y) / variance, 0.0)
        elif not self.unit:
            self.unit = y / x
        self.fixed = max(y - self.unit * x, 0.0)

    def units_within(self, ms: float) -> float:
        """How many units a launch of `ms` milliseconds has; without bound while nothing is known."""
        return (ms - self.fixed) / self.unit if self.unit else float("inf")
