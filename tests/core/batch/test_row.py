"""Which row runs first."""

from __future__ import annotations

from types import SimpleNamespace

from polymux.core.batch.row import Row


def test_urgent_rows_run_first_within_their_priority():
    early, late, important = (Row(SimpleNamespace(priority=priority)) for priority in (0, 0, 1))
    late.urgent = True
    assert sorted([early, late, important], key=lambda row: row.rank) == [important, late, early]
