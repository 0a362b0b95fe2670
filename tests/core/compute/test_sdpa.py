"""The reference attention against attention written out in float64: packed, paged and cross, with every option."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions, PackedContext, PagedBatch, PagedContext, choose_attention
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.errors import InternalError

BACKEND = SdpaAttention()
DIM = 8
HEADS = st.sampled_from([(1, 1), (4, 4), (4, 2), (6, 2), (8, 1)])


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
    """One row, (L, heads, dim), position by position: softmax over the keys that each query may see."""
    heads, group = query.shape[1], query.shape[1] // key.shape[1]
    first = len(key) - len(query)
    out = torch.empty_like(query, dtype=torch.float64)
    for place, head in itertools.product(range(len(query)), range(heads)):
        position = first + place
        seen = [
            other
            for other in range(len(key))
            if (other <= position or not options.causal)
            and (options.window is None or abs(position - other) < options.window)
        ]
        scores = key[seen, head // group].double() @ query[place, head].double() * options.scale
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        weights = scores.exp()
        total = weights.sum() + (options.sinks[head].double().exp() if options.sinks is not None else 0)
        out[place, head] = (weights / total) @ value[seen, head // group].double()
    return out.float()


options_of = st.builds(
    lambda causal, window, softcap, sinks: (causal, window, softcap, sinks),
    causal=st.booleans(),
    window=st.sampled_from([None, 1, 3, 50]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
)


def make_options(drawn: tuple, heads: int) -> AttentionOptions:
    causal, window, softcap, sinks = drawn
    return AttentionOptions(
        scale=DIM**-0.5, causal=causal, window=window, softcap=softcap, sinks=torch.randn(heads) if sinks else None
    )


def make_batch(tables: list[list[int]], rows: list[tuple[int, int]], block: int) -> PagedBatch:
    """Rows with (past, new) tokens, each in the slot of its number."""
    starts = [0, *itertools.accumulate(new for _, new in rows)]
    lengths = [past + new for past, new in rows]
    return PagedBatch(
        starts,
        lengths,
        block,
        torch.tensor(tables),
        slots=torch.arange(len(rows)),
        row_starts=torch.tensor(starts),
        row_lengths=torch.tensor(lengths),
        token_slots=torch.tensor([row for row, (_, new) in enumerate(rows) for _ in range(new)]),
        positions=torch.tensor([place for past, new in rows for place in range(past, past + new)]),
    )


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), heads=HEADS, drawn=options_of, seed=st.integers(0, 99)
)
def test_packed_rows_see_themselves_only(lengths: list[int], heads: tuple[int, int], drawn: tuple, seed: int) -> None:
    torch.manual_seed(seed)
    options = make_options(drawn, heads[0])
    starts = [0, *itertools.accumulate(lengths)]
    query, key, value = torch.randn(starts[-1], heads[0], DIM), *torch.randn(2, starts[-1], heads[1], DIM)
    out = PackedContext(BACKEND, starts).attend(0, query, key, value, options)
    for start, end in itertools.pairwise(starts):
        expected = attend_plainly(query[start:end], key[start:end], value[start:end], options)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=1e-5)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 11), st.integers(1, 5)), min_size=1, max_size=5),
    heads=HEADS,
    drawn=options_of,
    size=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_paged_rows_extend_their_blocks(
    rows: list[tuple[int, int]], heads: tuple[int, int], drawn: tuple, size: int, seed: int
) -> None:
    """Rows with (past, new) tokens in scattered blocks: chunks and single steps mixed, each reads all of its own."""
    torch.manual_seed(seed)
    options = make_options((True, *drawn[1:]), heads[0])
    layers, layer = 2, 1
    columns = max(-(-(past + new) // size) for past, new in rows)
    order = torch.randperm(len(rows) * columns).view(len(rows), columns)
    cache = torch.randn(len(rows) * columns, layers, 2, size, heads[1], DIM)
    untouched = cache[:, 0].clone()
    whole = [torch.randn(2, past + new, heads[1], DIM) for past, new in rows]
    tables, starts = [], [0]
    for row, (past, new) in enumerate(rows):
        used = order[row, : -(-(past + new) // size)].tolist()
        tables.append(used + used[-1:] * (columns - len(used)))
        for place in range(past):
            cache[used[place // size], layer, :, place % size] = whole[row][:, place]
        starts.append(starts[-1] + new)
    batch = make_batch(tables, rows, size)
    query = torch.randn(starts[-1], heads[0], DIM)
    key, value = (torch.cat([each[part, past:] for each, (past, _) in zip(whole, rows)]) for part in range(2))
    out = PagedContext(BACKEND, cache, batch).attend(layer, query, key, value, options)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        expected = attend_plainly(query[start:end], whole[row][0], whole[row][1], options)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(cache[:, 0], untouched), "another layer was written"


@settings(max_examples=20, deadline=None)
@given(
    counts=st.lists(st.integers(1, 3), min_size=1, max_size=4), heads=HEADS, drawn=options_of, seed=st.integers(0, 99)
)
def test_cross_attention_reads_all_of_a_rows_own_slab(
    counts: list[int], heads: tuple[int, int], drawn: tuple, seed: int
) -> None:
    """Neither causal nor windowed, whatever the decoder's own layers are; two rows may read one slab."""
    torch.manual_seed(seed)
    options = make_options(drawn, heads[0])
    starts = [0, *itertools.accumulate(counts)]
    slabs = torch.randn(3, 2, 2, 7, heads[1], DIM)
    reads = [row % 3 for row in range(len(counts))]
    batch = make_batch([[0]] * len(counts), [(0, count) for count in counts], 4)
    batch.slabs = reads
    query = torch.randn(starts[-1], heads[0], DIM)
    out = PagedContext(BACKEND, slabs, batch, slabs).attend_slab(1, query, options)
    whole = AttentionOptions(scale=options.scale, causal=False, softcap=options.softcap, sinks=options.sinks)
    for row, (start, end) in enumerate(itertools.pairwise(starts)):
        key, value = slabs[reads[row], 1]
        expected = attend_plainly(query[start:end], key, value, whole)
        torch.testing.assert_close(out[start:end], expected, rtol=1e-4, atol=1e-5)


def test_of_a_slab_that_repeats_itself_one_copy_is_enough() -> None:
    """Attention to copies of everything is attention to it, so what is behind the first is not looked at."""
    slabs = torch.randn(2, 1, 2, 3, 2, DIM).repeat(1, 1, 1, 4, 1, 1)
    batch = make_batch([[0], [0]], [(0, 1), (0, 5)], 4)
    batch.slabs = [0, 1]
    query = torch.randn(6, 2, DIM)
    options = AttentionOptions(scale=1.0, causal=False)
    whole = PagedContext(BACKEND, slabs, batch, slabs).attend_slab(0, query, options)
    batch.slab_units = [3, None]
    slabs[0, :, :, 3:] = float("nan")
    torch.testing.assert_close(PagedContext(BACKEND, slabs, batch, slabs).attend_slab(0, query, options), whole)


def test_a_row_that_is_not_finite_stays_alone() -> None:
    """A row's NaN never reaches a neighbour through padding or masks."""
    cache = torch.zeros(4, 1, 2, 4, 2, DIM)
    batch = make_batch([[0, 1], [2, 2]], [(7, 1), (1, 1)], 4)
    query, key, value = torch.randn(2, 2, DIM), *torch.randn(2, 2, 2, DIM)
    cache[0] = float("nan")
    out = PagedContext(BACKEND, cache, batch).attend(0, query, key, value, AttentionOptions(scale=1.0))
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()


def test_cross_attention_without_slabs_is_an_error() -> None:
    context = PagedContext(BACKEND, torch.empty(0), make_batch([[0]], [(0, 1)], 4))
    with pytest.raises(InternalError, match="without slabs"):
        context.attend_slab(0, torch.empty(0, 1, DIM), AttentionOptions(scale=1.0))


def test_a_backend_whose_probe_breaks_costs_itself_alone() -> None:
    class Broken(SdpaAttention):
        name = "broken"

        def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
            raise OSError("a library is missing")

    class Picky(SdpaAttention):
        def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
            return "not today"

    chosen = choose_attention([Broken(), Picky()], torch.device("cpu"), torch.float32, 64)
    assert type(chosen) is SdpaAttention
