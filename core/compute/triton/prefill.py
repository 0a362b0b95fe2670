"""Paged attention for rows that bring many queries.

The new keys and values are in the cache already, so a chunk and a cached prefix are read alike.
"""

from __future__ import annotations

from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.tiles import Blocks, attend_tiles


def attend_chunks(
    query: Tensor,
    cache: Tensor,
    tables: Tensor,
    slots: Tensor,
    starts: Tensor,
    lengths: Tensor,
    block: int,
    options: AttentionOptions,
    out: Tensor,
) -> None:
    """Rows of several queries each: row r's are query[starts[r]:starts[r + 1]], the last of its `lengths[r]` tokens.

    `query` and `out` are (T, heads, dim), `cache` is (blocks, 2, block, kv heads, dim). The launch depends on T and on
    how many rows there may be, on nothing else: a recorded one may be filled again with other rows, some of them of no
    queries.
    """
    attend_tiles(query, cache[:, 0], cache[:, 1], out, starts, Blocks(tables, slots, lengths, block), options)
