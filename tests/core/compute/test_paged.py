"""Our Triton kernels for rows that read blocks, against the reference; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/core/compute/test_paged.py   (without a card)
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial

import pytest
import torch

from polymux.core.compute.attention import AttentionOptions, RowBounds
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.testing.rows import lay_out

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.core.compute.triton.attention import TritonAttention  # noqa: E402
from polymux.core.compute.triton.decode import attend_singles  # noqa: E402
from polymux.core.compute.triton.draw import draw  # noqa: E402
from polymux.core.compute.triton.linear import multiply  # noqa: E402
from polymux.core.compute.triton.rotary import rotate_write  # noqa: E402

BLOCK, HEADS, KV_HEADS = 8, 4, 2
DTYPES = {torch.float32: 1e-4, torch.float16 if INTERPRETED else torch.bfloat16: 3e-2}

LAUNCHES = {
    "single tokens": ([1, 1, 1], [0, 130, 37]),
    "prompts": ([5, 70], [0, 33]),
    "both": ([1, 1, 5, 129], [300, 8, 3, 0]),
    "many rows": ([1] * 9, [3 * i for i in range(9)]),
}

OPTIONS = {
    "plain": AttentionOptions(0.2),
    "window": AttentionOptions(0.2, window=20),
    "softcap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=torch.linspace(-1, 2, HEADS)),
}


build_batch = partial(lay_out, block=BLOCK, device=DEVICE)


def send(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


def here(options: AttentionOptions) -> AttentionOptions:
    sinks = None if options.sinks is None else options.sinks.to(DEVICE)
    return AttentionOptions(options.scale, options.causal, options.window, options.softcap, sinks)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("launch", LAUNCHES)
def test_rows_read_their_blocks(launch: str, kind: str, dim: int, dtype: torch.dtype) -> None:
    batch, blocks = build_batch(*LAUNCHES[launch])
    cache = random(blocks, 2, BLOCK, KV_HEADS, dim, dtype=dtype)
    query = random(batch.starts[-1], HEADS, dim, dtype=dtype)
    found = TritonAttention().paged(query, cache, batch, here(OPTIONS[kind]))
    exact = SdpaAttention().paged(query.float(), cache.float(), batch, here(OPTIONS[kind]))
    torch.testing.assert_close(found.float(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("prefix", [0, 2, 9])
@pytest.mark.parametrize("rows", [3, 9])
def test_a_common_prefix_is_read_once_with_the_same_result(rows: int, prefix: int) -> None:
    batch, blocks = build_batch([1] * rows, [prefix * BLOCK + 3 * i for i in range(rows)], shared=prefix)
    cache = random(blocks, 2, BLOCK, KV_HEADS, 16)
    query = random(rows, HEADS, 16)
    arguments = (query, cache, batch.tables, batch.slots, batch.row_lengths, BLOCK, batch.longest, OPTIONS["plain"])
    found = attend_singles(*arguments, send([prefix * BLOCK]))
    torch.testing.assert_close(found, attend_singles(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_are_written_where_their_rows_are(normed: bool) -> None:
    """Queries come back turned, and padding writes nothing."""
    batch, blocks = build_batch([1, 6], [9, 3])
    batch.positions[0] = -1
    cache = torch.full((blocks, 2, BLOCK, KV_HEADS, 16), 7.0, device=DEVICE)
    merged, table = random(7, HEADS + 2 * KV_HEADS, 16), random(2, 40, 8).repeat(1, 1, 2)
    turns = batch.positions.clamp(min=0)
    weights = (random(16), random(16) + 1, 1e-6)
    query = rotate_write(merged, HEADS, KV_HEADS, (table, turns), weights if normed else None, cache, batch)
    turned = merged[:, : HEADS + KV_HEADS]
    if normed:
        scales = torch.stack([weights[0]] * HEADS + [weights[1]] * KV_HEADS)
        turned = torch.nn.functional.rms_norm(turned, (16,), eps=1e-6) * scales
    cos, sin = table[0, turns][:, None], table[1, turns][:, None]
    turned = turned * cos + torch.cat([-turned[..., 8:], turned[..., :8]], dim=-1) * sin
    expected = torch.full_like(cache, 7.0)
    blocks_of = batch.tables[batch.token_slots, turns // BLOCK]
    expected[blocks_of[1:], 0, turns[1:] % BLOCK] = turned[1:, HEADS:]
    expected[blocks_of[1:], 1, turns[1:] % BLOCK] = merged[1:, HEADS + KV_HEADS :]
    torch.testing.assert_close(query[1:], turned[1:, :HEADS], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(cache, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_a_few_rows(rows: int, biased: bool) -> None:
    x, weight, bias = random(rows, 1500), random(7, 1500), random(7)
    expected = torch.nn.functional.linear(x, weight, bias if biased else None)
    torch.testing.assert_close(multiply(x, weight, bias if biased else None), expected, rtol=1e-4, atol=1e-3)


def test_draws_are_greedy_at_temperature_zero_and_tell_what_is_not_finite() -> None:
    logits = random(3, 5000)
    logits[2, 4000] = float("nan")
    slots = send([0, 1, 2])
    temperatures = torch.tensor([0.0, 0.7, 0.0], device=DEVICE)
    tokens, finite = draw(logits, temperatures, slots, slots, slots)
    again, _ = draw(logits[1:2].contiguous(), temperatures, slots, slots[1:2], slots[1:2])
    assert tokens[0] == logits[0].argmax() and finite.tolist() == [True, True, False]
    assert 0 <= int(tokens[1]) < 5000 and tokens[1] == again[0], "a row's draw depends on its neighbours"


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_recorded_launch_is_padded_with_rows_of_no_tokens(kind: str) -> None:
    """Single tokens and pieces of prompts in one launch, of which the host only knows how many there may be."""
    options = here(OPTIONS[kind])
    counts, befores = [1, 1, 5, 70], [300, 8, 3, 0]
    real, blocks = build_batch(counts, befores)
    cache, query = random(blocks, 2, BLOCK, KV_HEADS, 16), random(128, HEADS, 16)
    places = [0, 1, 4, 5]  # four rows of single tokens at most, three of several
    slots, lengths, starts = [0] * 7, [0] * 7, [2, 2, 2, 2, 77, 77, 77, 77]
    for place, row in enumerate(places):
        slots[row], lengths[row], starts[row] = place, real.lengths[place], real.starts[place]
    bound = replace(
        real,
        starts=[],
        lengths=[max(real.lengths)] * 7,
        slots=send(slots),
        row_starts=send(starts),
        row_lengths=send(lengths),
        bounds=RowBounds(4, 128),
    )
    found = TritonAttention().paged(query, cache, bound, options)
    exact = SdpaAttention().paged(query[:77], cache, real, options)
    torch.testing.assert_close(found[:77], exact, rtol=1e-4, atol=1e-4)
