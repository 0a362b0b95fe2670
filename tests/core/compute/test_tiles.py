"""Tiles of queries over tiles of keys, where tiles begin and end: against the reference.

TRITON_INTERPRET=1 pytest -m gpu tests/core/compute/test_tiles.py   (without a card)
"""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate

import pytest
import torch

from polymux.core.compute.attention import AttentionOptions, PackedRows, PagedBatch
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.testing.rows import lay_out

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.core.compute.triton.packed import attend_packed  # noqa: E402
from polymux.core.compute.triton.prefill import attend_chunks  # noqa: E402

DTYPES = {torch.float32: 1e-4, torch.float16 if INTERPRETED else torch.bfloat16: 3e-2}

EDGES = {
    "up to a tile and behind it": ([63, 64, 65], [0, 0, 0]),
    "several tiles": ([127, 129, 2], [0, 0, 0]),
    "a prefix up to a tile and behind it": ([3, 3, 3, 31], [61, 64, 65, 130]),
    "a long row beside short ones": ([2, 200, 5, 1], [0, 70, 150, 9]),
    "rows of nothing": ([0, 33, 0, 0, 20, 0], [5, 40, 0, 0, 0, 0]),
}
HEADS = {"single": (2, 2), "groups": (8, 2), "of seven": (14, 2), "all of one": (20, 1)}
KINDS = {
    "plain": {},
    "window of a tile": {"window": 64},
    "window of a tile and one": {"window": 65},
    "small window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "everything": {"window": 80, "softcap": 2.0, "sinks": True},
}


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def send(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def make_options(heads: int, causal: bool = True, **kind: object) -> AttentionOptions:
    sinks = torch.linspace(-1, 2, heads, device=DEVICE) if kind.pop("sinks", False) else None
    return AttentionOptions(0.2, causal, sinks=sinks, **kind)  # type: ignore[arg-type]


def leave_out_nothing(batch: PagedBatch) -> PagedBatch:
    """Without the rows that bring nothing."""
    kept = [row for row, length in enumerate(batch.lengths) if length]
    starts = [batch.starts[row] for row in kept] + [batch.starts[-1]]
    return replace(
        batch,
        starts=starts,
        lengths=[batch.lengths[row] for row in kept],
        slots=send(kept),
        row_starts=send(starts),
        row_lengths=batch.row_lengths[kept],
    )


def check_blocks(
    edges: str, heads: str, kind: str, dim: int, dtype: torch.dtype = torch.float32, block: int = 16
) -> None:
    batch, blocks = lay_out(*EDGES[edges], block, DEVICE)
    many, few = HEADS[heads]
    options = make_options(many, **KINDS[kind])
    cache = random(blocks, 2, block, few, dim, dtype=dtype)
    query = random(batch.starts[-1], many, dim, dtype=dtype)
    # what stands behind a row's tokens in its last block may be anything
    for row, length in enumerate(batch.lengths):
        if length % block:
            cache[batch.tables[row, length // block], :, length % block :] = float("nan")
    found = torch.full_like(query, float("nan"))
    attend_chunks(query, cache, batch.tables, batch.slots, batch.row_starts, batch.row_lengths, block, options, found)
    exact = SdpaAttention().paged(query.float(), cache.float().nan_to_num(), leave_out_nothing(batch), options)
    torch.testing.assert_close(found.float(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])


def check_packed(
    edges: str, heads: str, kind: str, dim: int, dtype: torch.dtype = torch.float32, causal: bool = True
) -> None:
    """Queries, keys and values are views of one product."""
    counts = EDGES[edges][0]
    many, few = HEADS[heads]
    options = make_options(many, causal, **KINDS[kind])
    starts = [0, *accumulate(counts)]
    merged = random(starts[-1], many + 2 * few, dim, dtype=dtype)
    query, key, value = merged.split([many, few, few], dim=1)
    edges_here = torch.tensor(starts, dtype=torch.int32, device=DEVICE)
    found = attend_packed(query, key, value, edges_here, options)
    full = [0, *accumulate(count for count in counts if count)]
    exact = SdpaAttention().packed(query.float(), key.float(), value.float(), PackedRows(full), options)
    torch.testing.assert_close(found.float(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_in_blocks_see_all_of_themselves_and_nothing_else(edges: str, kind: str) -> None:
    check_blocks(edges, "groups", kind, 16)


@pytest.mark.parametrize("heads", HEADS)
def test_heads_that_share_keys_stand_in_one_tile(heads: str) -> None:
    check_blocks("a long row beside short ones", heads, "everything", 16)


@pytest.mark.parametrize("block", [8, 48, 256])
def test_blocks_of_any_size(block: int) -> None:
    check_blocks("several tiles", "groups", "small window", 16, block=block)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 96, 128, 256])
def test_heads_of_any_dim(dim: int, dtype: torch.dtype) -> None:
    check_blocks("a long row beside short ones", "groups", "window of a tile", dim, dtype)
    check_packed("several tiles", "groups", "softcap", dim, dtype)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "both ways"])
@pytest.mark.parametrize("edges", EDGES)
@pytest.mark.parametrize("kind", KINDS)
def test_packed_rows_see_all_of_themselves_and_nothing_else(edges: str, kind: str, causal: bool) -> None:
    check_packed(edges, "groups", kind, 16, causal=causal)
