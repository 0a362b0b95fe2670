"""How far a run has come: by its steps, or by the clock where that is stricter."""

from __future__ import annotations

import json
import time
from typing import Any

FIRST = 2
"""Steps before the clock starts: they also compile."""
WARM = 100
"""Steps in which a learning rate rises."""
COOL = 0.4
"""The share of a run in which it falls."""


class Pace:
    """`steps` to go, in `minutes` at most. A run that the clock ends early still ends its schedules."""

    def __init__(self, name: str, steps: int, minutes: float) -> None:
        self.name = name
        self.steps = steps
        self.step = 0
        self._seconds = minutes * 60
        self._began = time.monotonic()
        self._told = 0.0

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def done(self) -> float:
        """Of 1."""
        return min(1.0, max(self.step / self.steps, self.seconds / self._seconds))

    @property
    def rate(self) -> float:
        """A learning rate's factor: up in the first steps, down to nothing at the end."""
        return min(1.0, (self.step + 1) / WARM, (1 - self.done) / COOL)

    def advance(self) -> bool:
        """Count a step. False when the run is over."""
        self.step += 1
        if self.step == FIRST:
            self._began = time.monotonic()
        return self.done < 1

    def tell(self, every: float = 10.0, **figures: Any) -> bool:
        """Print a line of JSON, unless one was printed less than `every` seconds ago. Figures may be callables."""
        if self.seconds - self._told < every and self.done < 1:
            return False
        self._told = self.seconds
        known = {name: figure() if callable(figure) else figure for name, figure in figures.items()}
        line = {"run": self.name, "step": self.step, "seconds": round(self.seconds, 1), **known}
        print(json.dumps({name: round(v, 5) if isinstance(v, float) else v for name, v in line.items()}), flush=True)
        return True
