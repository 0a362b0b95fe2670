"""What the next launch runs, as pure data: the same on every rank, halved when a launch fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from polymux.core.batch.row import Row


@dataclass(slots=True)
class Grant:
    """`count` units of one row, from unit `start` on. `final`: they reach the end of what the row has."""

    row: Row
    start: int
    count: int
    final: bool = True
    guesses: Sequence[int] = ()
    """The last of the units are these tokens, which the row does not have yet."""


@dataclass(slots=True)
class Plan:
    """The grants of one launch of one stage, in the order of the packed batch."""

    stage: str
    grants: list[Grant]

    @property
    def units(self) -> int:
        return sum(grant.count for grant in self.grants)

    def halve(self) -> tuple[Plan, Plan]:
        middle = len(self.grants) // 2
        return Plan(self.stage, self.grants[:middle]), Plan(self.stage, self.grants[middle:])
