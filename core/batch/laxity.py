"""Which denoising row goes first: the one whose latest start comes soonest.

A row's laxity is what is left until it is due, less what its steps will take. A request without a deadline is due after
`STRETCH` times what it would take alone, so short ones pass long ones, and whoever waits becomes more urgent with every
moment: nobody starves. Laxity is taken as of the row's arrival, not of now: now it would grow with every step taken,
and rows that are equally urgent would take turns and all end late, instead of one after the other.
"""

from __future__ import annotations

from polymux.core.batch.cost import LaunchCost
from polymux.core.batch.trajectory import DenoiseRow

STRETCH = 3.0
"""How much longer than alone a request may take before it is late."""


def order(row: DenoiseRow, cost: LaunchCost) -> tuple[int, float, int]:
    """Smaller goes first: the priority, the latest start in seconds of the monotonic clock, the order of arrival."""
    work = cost.milliseconds(row.size) * row.full_steps / 1e3
    job = row.job
    due = job.arrived + STRETCH * work if job.expires is None else job.expires
    return -job.priority, due - work, row.number
