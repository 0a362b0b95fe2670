"""Our own CPU kernels: what torch computes, bit by bit the same for a row alone, and left out where they cannot run."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.activations import ACT2FN

from polymux.core.batch.tokens import TokenBatch
from polymux.core.compute import native
from polymux.core.compute.attention import AttentionOptions, PagedBatch, PagedContext, choose_attention
from polymux.core.compute.cpu import kernels as kernels_module
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.cpu.kernels import CpuKernels, load_cpu_kernels
from polymux.core.compute.cpu.operations import NativeOperations
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.fast.operations import Operations, RotaryTable, choose_operations
from polymux.core.compute.fast.structure import Norm
from polymux.core.compute.int8 import Int8Linear
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.testing.tiny import DECODERS, VOCABULARY, build

HEADS = st.sampled_from([(1, 1), (4, 2), (9, 3), (5, 1), (8, 1)])
DIMS = st.sampled_from([2, 8, 16, 64, 80])


def load_kernels() -> CpuKernels:
    kernels = load_cpu_kernels()
    if kernels is None:
        pytest.skip("the kernels cannot be built here")
    return kernels


@pytest.fixture
def operations() -> NativeOperations:
    return NativeOperations(load_kernels())


def assert_close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [3, 16, 77, 576])
def test_a_norm_with_the_residual_is_torchs(operations: NativeOperations, width: int) -> None:
    x, residual = torch.randn(2, 37, width)
    norm = Norm(torch.randn(width), 1e-5)
    normed, total = Operations().add_norm(x, residual, norm)
    found, found_total = operations.add_norm(x, residual.clone(), norm)
    assert_close(found, normed)
    assert torch.equal(found_total, total)
    assert_close(operations.norm(x, norm), Operations().norm(x, norm))


@pytest.mark.parametrize("name", ["silu", "gelu_pytorch_tanh", "relu"])
def test_a_gate_is_torchs_over_the_whole_range(operations: NativeOperations, name: str) -> None:
    """An activation without a kernel is left to torch."""
    x = torch.cat([torch.linspace(-200, 200, 4001).view(1, -1), torch.ones(1, 4001)], dim=1)
    act: nn.Module = ACT2FN[name]
    torch.testing.assert_close(operations.gate(act, x), Operations().gate(act, x), rtol=1e-5, atol=1e-5)


def make_batch(lengths: list[int], block: int, counts: list[int] | None = None) -> PagedBatch:
    """Rows of these lengths in scattered blocks and slots, the last `counts` tokens (one) of each are new."""
    counts = counts or [1] * len(lengths)
    columns = max(-(-length // block) for length in lengths)
    slots = torch.randperm(len(lengths))
    starts = [0, *itertools.accumulate(counts)]
    return PagedBatch(
        starts,
        lengths,
        block,
        torch.randperm(len(lengths) * columns).view(len(lengths), columns),
        slots=slots,
        row_starts=torch.tensor(starts),
        row_lengths=torch.tensor(lengths),
        token_slots=slots.repeat_interleave(torch.tensor(counts)),
        positions=torch.cat([torch.arange(end - count, end) for end, count in zip(lengths, counts)]),
    )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.sampled_from([1, 1, 3, 19])), min_size=1, max_size=5),
    heads=HEADS,
    dim=DIMS,
    block=st.sampled_from([1, 4, 16]),
    window=st.sampled_from([None, 1, 3, 17]),
    softcap=st.sampled_from([None, 2.0]),
    sinks=st.booleans(),
    seed=st.integers(0, 99),
)
def test_paged_attention_is_the_references(
    rows: list[tuple[int, int]],
    heads: tuple[int, int],
    dim: int,
    block: int,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    seed: int,
) -> None:
    """Single queries beside chunks; no padding is ever read, and each query's bits are those of the query alone."""
    load_kernels()
    torch.manual_seed(seed)
    rows = sorted(rows, key=lambda row: row[1])
    batch = make_batch([past + new - 1 for past, new in rows], block, [new for _, new in rows])
    cache = torch.randn(batch.tables.numel(), 2, 2, block, heads[1], dim)[:, 1]
    query = torch.randn(batch.starts[-1], heads[0], dim)
    sink = torch.randn(heads[0]) if sinks else None
    options = AttentionOptions(dim**-0.5, window=window, softcap=softcap, sinks=sink)
    found = NativeAttention().paged(query, cache, batch, options)
    assert_close(found, SdpaAttention().paged(query, cache, batch, options))
    for token, place in enumerate(batch.positions):
        own = slice(token, token + 1)
        alone = load_kernels().attend(
            query[own], cache, batch.tables, batch.token_slots[own], place.view(1) + 1, options
        )
        assert torch.equal(alone, found[own])


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("normed", [False, True])
def test_rotated_keys_and_values_reach_their_blocks(operations: NativeOperations, normed: bool, several: bool) -> None:
    """Also where tokens stand at several positions at once, which are not their places."""
    heads, kv_heads, dim, block = 4, 2, 16, 4
    batch = make_batch([1, 9, 14], block, [1, 4, 7])
    merged = torch.randn(12, heads + 2 * kv_heads, dim)
    table = torch.randn(2, 20, dim)
    norms = [Norm(torch.randn(dim), 1e-6) for _ in range(2)] if normed else [None, None]

    class Layer:
        q_norm, k_norm = norms
        options = AttentionOptions(dim**-0.5)
        rotary = RotaryTable(table, torch.arange(dim) % 3)

    outcomes = []
    for steps, backend in ((Operations(), SdpaAttention()), (operations, NativeAttention())):
        cache = torch.zeros(batch.tables.numel(), 2, 2, block, kv_heads, dim)
        context = PagedContext(backend, cache, batch)
        turns = (
            torch.stack([batch.positions, batch.positions // 2, batch.positions // 3]) if several else batch.positions
        )
        out = steps.attend(1, Layer, merged, heads, kv_heads, turns, context)  # type: ignore[arg-type]
        outcomes.append((out, cache))
    for expected, found in zip(*outcomes):
        assert_close(found, expected)


def step(decoder: FastDecoder, cache: Tensor, batch: PagedBatch, ids: Tensor) -> Tensor:
    everything = torch.arange(len(ids))
    context = PagedContext(NativeAttention(), cache, batch)
    with torch.inference_mode():
        return decoder.forward(TokenBatch(ids, batch.positions, everything, everything, context))


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_decode_step_is_bitwise_the_same_alone_and_among_sixteen(family: str) -> None:
    """The deterministic mode's promise: neither neighbours nor threads change a bit of a row's logits or cache."""
    load_kernels()
    decoder = accelerate(TransformersDecoder(build(DECODERS[family])), Int8Linear)
    assert isinstance(decoder, FastDecoder) and isinstance(decoder.operations, NativeOperations)
    shape, threads = decoder.shape, torch.get_num_threads()
    batch = make_batch([1, 2, 16, 17, 33, 40, 100, 200] * 2, 16)
    cache = torch.randn(batch.tables.numel(), shape.layers, 2, 16, shape.kv_heads, shape.head_dim)
    ids = torch.randint(0, VOCABULARY, (16,))
    among = cache.clone()
    together = step(decoder, among, batch, ids)
    try:
        for row, length in enumerate(batch.lengths):
            torch.set_num_threads(1 + row % 3)
            own = slice(row, row + 1)
            alone = PagedBatch(
                [0, 1],
                [length],
                16,
                batch.tables,
                slots=batch.slots[own],
                row_starts=torch.tensor([0, 1]),
                row_lengths=batch.row_lengths[own],
                token_slots=batch.token_slots[own],
                positions=batch.positions[own],
            )
            after = cache.clone()
            assert torch.equal(step(decoder, after, alone, ids[own])[0], together[row])
            blocks = batch.tables[batch.slots[row]]
            assert torch.equal(after[blocks], among[blocks])
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_prompt_is_bitwise_the_same_however_it_is_cut(family: str) -> None:
    """So neither a cached prefix, nor chunks, nor guesses ahead, nor starting over after preemption change a bit."""
    load_kernels()
    decoder = accelerate(TransformersDecoder(build(DECODERS[family])), Int8Linear)
    assert isinstance(decoder, FastDecoder) and isinstance(decoder.operations, NativeOperations)
    shape, ids = decoder.shape, torch.randint(0, VOCABULARY, (70,))
    tables, outcomes = torch.randperm(5)[None], []
    for counts in ([70], [1] * 70, [32, 38], [3, 9] * 5 + [10]):
        cache = torch.zeros(5, shape.layers, 2, 16, shape.kv_heads, shape.head_dim)
        logits, end = [], 0
        for count in counts:
            start, end = end, end + count
            batch = replace(make_batch([end], 16, [count]), tables=tables)
            logits.append(step(decoder, cache, batch, ids[start:end]))
        outcomes.append(torch.cat(logits))
    assert all(torch.equal(each, outcomes[0]) for each in outcomes)


@pytest.mark.parametrize(("inputs", "rank", "outputs"), [(64, 4, 80), (77, 1, 3), (576, 16, 1536)])
def test_what_an_adapter_adds_is_torchs_and_a_rows_own(inputs: int, rank: int, outputs: int) -> None:
    x, down, up = torch.randn(33, inputs), torch.randn(rank, inputs), torch.randn(outputs, rank)
    base = torch.randn(33, outputs + 7)
    out = base.clone()
    load_kernels().add_low_rank(out[:, 7:], x, down, up)
    torch.testing.assert_close(out[:, 7:], base[:, 7:] + x @ down.T @ up.T, rtol=1e-4, atol=1e-3)
    assert torch.equal(out[:, :7], base[:, :7])
    alone = base[5:6].clone()
    load_kernels().add_low_rank(alone[:, 7:], x[5:6], down, up)
    assert torch.equal(alone, out[5:6])


def test_threads_change_nothing_where_they_share_the_work(operations: NativeOperations) -> None:
    """Large enough that every kernel wakes threads: one row's bits are the same alone."""
    x, residual, norm = torch.randn(64, 576), torch.randn(64, 576), Norm(torch.randn(576), 1e-5)
    whole = operations.add_norm(x, residual.clone(), norm)[0]
    assert torch.equal(operations.add_norm(x[9:10], residual[9:10].clone(), norm)[0], whole[9:10])
    batch = make_batch([300] * 16, 16)
    cache, query = torch.randn(batch.tables.numel(), 2, 16, 3, 64), torch.randn(16, 9, 64)
    kernels, options = load_kernels(), AttentionOptions(0.125)
    mixed = kernels.attend(query, cache, batch.tables, batch.slots, batch.row_lengths, options)
    alone = kernels.attend(query[5:6], cache, batch.tables, batch.slots[5:6], batch.row_lengths[5:6], options)
    assert torch.equal(alone, mixed[5:6])


def test_a_row_that_is_not_finite_stays_alone(operations: NativeOperations) -> None:
    batch = make_batch([7, 7], 4)
    cache, query = torch.zeros(batch.tables.numel(), 2, 4, 2, 8), torch.randn(2, 4, 8)
    cache[batch.tables[batch.slots[0]]] = float("nan")
    out = NativeAttention().paged(query, cache, batch, AttentionOptions(1.0))
    assert not out[0].isfinite().any()
    assert out[1].isfinite().all()
    assert operations.norm(torch.full((1, 16), float("nan")), Norm(torch.ones(16), 1e-6)).isnan().all()
    assert operations.gate(nn.SiLU(), torch.full((1, 16), float("nan"))).isnan().all()


def test_it_serves_float32_on_a_cpu_only() -> None:
    load_kernels()
    cpu, backend = torch.device("cpu"), NativeAttention()
    assert choose_attention([backend], cpu, torch.float32, 64) is backend
    for device, dtype, dim in (("cuda", torch.float32, 64), ("cpu", torch.bfloat16, 64), ("cpu", torch.float32, 512)):
        assert backend.refuses(torch.device(device), dtype, dim)
    assert type(choose_operations(cpu, torch.bfloat16)) is Operations


def test_without_a_compiler_torch_does_the_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "COMPILERS", ())
    kernels_module.load_cpu_kernels.cache_clear()
    try:
        cpu = torch.device("cpu")
        assert type(choose_operations(cpu, torch.float32)) is Operations
        assert type(choose_attention([NativeAttention()], cpu, torch.float32, 64)) is SdpaAttention
        assert caplog.text.count("no C++ compiler was found") == 1
    finally:
        kernels_module.load_cpu_kernels.cache_clear()
