"""The launches that a token stage tries before its first request, so that no request waits for a compiler.

What is compiled depends on how many tokens a launch has, how many rows bring one token and how many are drawn from;
`tests/core/batch/test_warming.py` holds this list against everything a launch can be.
"""

from __future__ import annotations

from polymux.core.batch.packing import SHARING_ROWS

FEW_ROWS = 4
"""Rows up to which every number of rows has kernels of its own."""

LARGEST_SHARING = 64
"""Rows from which on a prefix that is read once is read in tiles of the largest size."""


def list_mixed(most: int, longest: int) -> list[list[int]]:
    """Tokens of the rows in launches of up to `most` tokens: short and long prompts, single tokens, both. No row has
    more than `longest`: beyond it there are no blocks to look up."""
    few = range(1, FEW_ROWS + 1)
    wanted = [
        *([count] for count in few),
        *([1] * rows for rows in few),
        [7],
        [7, 80],
        [1] * 20,
        [1, 1, 32],
        [1, 200, 600],
    ]
    size = 128
    while size < most:  # products of other sizes are other kernels of the library, loaded when they are first called
        wanted.append([size])
        size *= 2
    wanted.append([most])
    return [split(counts, longest) for counts in wanted if sum(counts) <= most]


def split(counts: list[int], longest: int) -> list[int]:
    """As many tokens in rows of at most `longest`, single tokens first as in every launch."""
    parts = [[longest] * (count // longest) + [count % longest] for count in counts]
    return sorted(part for row in parts for part in row if part)


def list_sharing(most: int) -> list[int]:
    """Rows of steps that read a common prefix once."""
    sizes, rows = [], SHARING_ROWS
    while rows <= min(most, LARGEST_SHARING):
        sizes.append(rows)
        rows *= 2
    return sizes
