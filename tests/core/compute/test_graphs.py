"""Which recorded step serves how many rows: nobody waits for a recording while a larger one will do."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from polymux.core.compute.graphs import PADDED, PATIENCE, DecodeGraphs, size_ladder


class Noted(DecodeGraphs):
    """Records nothing, but notes what it would have recorded."""

    def __init__(self, most: int) -> None:
        super().__init__(lambda *args: (), most, most, torch.device("cpu"))
        self.noted: list[tuple[bool, int]] = []

    def _record(self, kind: Any, size: int) -> Any:
        self.noted.append((kind.sharing, size))
        return kind.sharing, size

    def choose(self, rows: int, *, sharing: bool = False) -> tuple[bool, int]:
        kind = next(iter(self._recorded)) if not sharing else type(next(iter(self._recorded)))(True)
        recorded, size = self._choose(kind, rows)
        assert recorded[1] == size  # type: ignore[index]
        return recorded  # type: ignore[return-value]


@pytest.mark.parametrize("most", [1, 6, 64, 128, 256, 300])
def test_a_few_sizes_serve_any_number_of_rows(most: int) -> None:
    graphs = Noted(most)
    graphs.record_few()
    few = len(graphs.noted)
    for rows in range(1, most + 1):
        size = graphs.choose(rows)[1]
        assert rows <= size <= PADDED * rows
    assert len(graphs.noted) == few <= 6


def test_the_others_are_recorded_one_by_one_while_nothing_runs() -> None:
    graphs = Noted(64)
    graphs.record_few()
    while graphs.record_more():
        pass
    assert sorted(size for _, size in graphs.noted) == size_ladder(64)
    assert graphs.choose(9)[1] == 16


def test_a_size_that_is_wanted_long_enough_is_recorded_though_somebody_waits() -> None:
    graphs = Noted(64)
    graphs.record_few()
    assert [graphs.choose(20)[1] for _ in range(PATIENCE + 1)] == [64] * PATIENCE + [24]


def test_a_common_prefix_is_read_by_each_row_until_it_can_be_read_once() -> None:
    graphs = Noted(16)
    graphs.record_few()
    assert graphs.choose(16, sharing=True) == (False, 16)
    while graphs.record_more():
        pass
    assert graphs.choose(16, sharing=True) == (True, 16)


def test_without_a_recording_the_first_launch_makes_one() -> None:
    graphs = Noted(16)
    assert graphs.choose(3) == (False, 4)
