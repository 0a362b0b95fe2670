"""Rows in blocks for a launch of attention by itself."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from polymux.core.compute.attention import PagedBatch


def lay_out(
    counts: Sequence[int], befores: Sequence[int], block: int, device: str = "cpu", shared: int = 0
) -> tuple[PagedBatch, int]:
    """Rows that bring `counts` tokens behind so many, in blocks in any order, of which the first `shared` are the same
    in all; and how many blocks there are. A row of no tokens has none before either."""
    lengths = [count + before if count else 0 for count, before in zip(counts, befores, strict=True)]
    rows, columns = len(counts), -(-max(lengths) // block)
    starts = [0, *accumulate(counts)]
    tables = torch.randperm(rows * columns, generator=torch.Generator().manual_seed(1)).view(rows, columns)
    tables[:, :shared] = tables[0, :shared]

    def send(numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    batch = PagedBatch(
        starts=starts,
        lengths=lengths,
        block=block,
        tables=tables.to(device),
        slots=send(list(range(rows))),
        row_starts=send(starts),
        row_lengths=send(lengths),
        token_slots=send([slot for slot, count in enumerate(counts) for _ in range(count)]),
        positions=send([before + i for count, before in zip(counts, befores, strict=True) for i in range(count)]),
    )
    return batch, rows * columns
