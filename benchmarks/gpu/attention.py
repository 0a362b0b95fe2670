"""Attention of many queries on a CUDA card: our kernel in several forms, and torch's on the same tokens.

prompt-512, -2016, -4064   one prompt, 32 query heads on 8 key heads of 128, causal
prompts-560                4,096 tokens in prompts of 560
prefix-2048                64 rows that bring 64 tokens each behind 2,048 cached ones
windows-16, windows-1      packed rows of 1,500, 20 heads of 64, not causal

Ours: `blocks` reads keys and values from blocks of 16 tokens, `packed` from where a projection left them, `described`
the same by tensor descriptors (the copy engine of newer cards), `ahead` these and each tile's scores during
the softmax of the one before. A form is rows x tile, warps, stages, and the most registers of a thread where that is
bounded.
Milliseconds of one layer, TFLOP/s of what has to be computed, and how far from the reference in fp32.

PYTHONPATH=benchmarks python benchmarks/gpu/attention.py --out attention.jsonl
With TRITON_INTERPRET=1 and --tiny: small rows on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.tools.tensor_descriptor import TensorDescriptor

from polymux.core.compute.attention import AttentionOptions, PackedRows, PagedBatch
from polymux.core.compute.packed.backends import CudnnAttention, Fa3Attention, VarlenAttention, repeat_heads
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.compute.triton.jit import kernel
from polymux.core.compute.triton.tiles import LOG2_E, Blocks, Form, attend_tiles, find_row
from polymux.core.testing.card import pretend_card

BLOCK = 16
TIMES, LAUNCHES = 3, 8

LLM = [
    ("blocks", Form(128, 64, 8, 3)),
    ("blocks", Form(128, 64, 8, 2)),
    ("blocks", Form(128, 64, 8, 4)),
    ("blocks", Form(128, 64, 8, 2, 128)),
    ("blocks", Form(128, 128, 8, 2)),
    ("blocks", Form(128, 32, 8, 4)),
    ("blocks", Form(64, 64, 4, 2)),
    ("blocks", Form(64, 64, 4, 3)),
    ("blocks", Form(64, 128, 4, 2)),
    ("packed", Form(128, 64, 8, 3)),
    ("packed", Form(128, 128, 8, 2)),
    ("packed", Form(64, 64, 4, 3)),
    ("described", Form(128, 64, 8, 3)),
    ("described", Form(128, 64, 8, 2, 128)),
    ("described", Form(128, 128, 8, 2)),
    ("described", Form(64, 128, 4, 2)),
    ("ahead", Form(128, 64, 8, 3)),
    ("ahead", Form(128, 64, 8, 2)),
]
WHISPER = [
    ("packed", Form(128, 64, 8, 3)),
    ("packed", Form(128, 128, 8, 3)),
    ("packed", Form(128, 64, 4, 3)),
    ("packed", Form(64, 64, 4, 3)),
    ("packed", Form(64, 128, 4, 3)),
    ("described", Form(128, 64, 8, 3)),
    ("described", Form(128, 128, 8, 3)),
    ("described", Form(64, 128, 4, 3)),
    ("ahead", Form(128, 64, 8, 3)),
]


@triton.jit
def _fold_described(
    peak, total, mixed, q, keys, values, row, begin, end, last, places_q, head, factor,
    DIM: tl.constexpr, TILE: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    for start in range(begin, end, TILE):
        keys_here = keys.load([row + start, head * DIM])
        scores = tl.dot(q, tl.trans(keys_here), input_precision="ieee")
        if MASKED:
            places = start + tl.arange(0, TILE)
            mask = (places < last)[None, :]
            if CAUSAL:
                mask = mask & (places[None, :] <= places_q[:, None])
            scores = tl.where(mask, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        shrink = tl.exp2(peak - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        values_here = values.load([row + start, head * DIM])
        mixed = tl.dot(weights.to(values_here.dtype), values_here, mixed * shrink[:, None], input_precision="ieee")
        peak = higher
    return peak, total, mixed


@triton.jit
def _take(peak, total, mixed, scores, values, factor):
    higher = tl.maximum(peak, tl.max(scores, axis=1) * factor)
    weights = tl.exp2(scores * factor - higher[:, None])
    shrink = tl.exp2(peak - higher)
    total = total * shrink + tl.sum(weights, axis=1)
    mixed = tl.dot(weights.to(values.dtype), values, mixed * shrink[:, None], input_precision="ieee")
    return higher, total, mixed


@triton.jit
def _fold_ahead(
    peak, total, mixed, q, keys, values, row, begin, end, head, factor, DIM: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Each tile's scores are computed while the softmax of the one before is."""
    if begin < end:
        scores = tl.dot(q, tl.trans(keys.load([row + begin, head * DIM])), input_precision="ieee")
        for start in range(begin, end - TILE, TILE):
            ahead = tl.dot(q, tl.trans(keys.load([row + start + TILE, head * DIM])), input_precision="ieee")
            here = values.load([row + start, head * DIM])
            peak, total, mixed = _take(peak, total, mixed, scores, here, factor)
            scores = ahead
        peak, total, mixed = _take(peak, total, mixed, scores, values.load([row + end - TILE, head * DIM]), factor)
    return peak, total, mixed


@kernel()
def _attend_described(
    query, keys, values, out, starts, scale, rows,
    HEADS: tl.constexpr, PACK: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr,
    CAUSAL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    QUERIES: tl.constexpr = ROWS // PACK
    row, tile = find_row(starts, rows, tl.program_id(1), QUERIES)
    begin = tl.load(starts + row).to(tl.int32)
    count = tl.load(starts + row + 1).to(tl.int32) - begin
    tile = tl.cdiv(count, QUERIES) - 1 - tile
    if tile < 0:
        return
    which = tl.arange(0, ROWS)
    head = tl.program_id(0) * PACK + which % PACK
    tokens = tile * QUERIES + which // PACK
    here = (which < QUERIES * PACK) & (tokens < count)
    dims = tl.arange(0, DIM)
    where_q = ((begin + tokens) * HEADS + head)[:, None] * DIM + dims[None, :]
    q = tl.load(query + where_q, here[:, None], other=0.0)
    last = count
    whole = count // TILE * TILE
    if CAUSAL:
        last = tl.minimum((tile + 1) * QUERIES, count)
        whole = (tile * QUERIES + 1) // TILE * TILE
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, DIM], tl.float32)
    factor = scale * LOG2_E
    kv_head = tl.program_id(0)
    if AHEAD:
        peak, total, mixed = _fold_ahead(
            peak, total, mixed, q, keys, values, begin, 0, whole, kv_head, factor, DIM, TILE
        )  # fmt: skip
    else:
        peak, total, mixed = _fold_described(
            peak, total, mixed, q, keys, values, begin, 0, whole, last, tokens, kv_head, factor, DIM, TILE, False,
            CAUSAL,
        )  # fmt: skip
    peak, total, mixed = _fold_described(
        peak, total, mixed, q, keys, values, begin, whole, last, last, tokens, kv_head, factor, DIM, TILE, True, CAUSAL
    )
    tl.store(out + where_q, (mixed / total[:, None]).to(out.dtype.element_ty), here[:, None])


@dataclass
class Case:
    name: str
    counts: list[int]
    before: int = 0
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True

    @property
    def flops(self) -> float:
        pairs = 0
        for count in self.counts:
            pairs += count * self.before + (count * (count + 1) // 2 if self.causal else count * count)
        return 4.0 * pairs * self.heads * self.dim


def list_cases(tiny: bool) -> list[Case]:
    if tiny:
        return [
            Case("prompt", [150], dim=16, heads=8, kv_heads=2),
            Case("prompts", [40, 40, 9], dim=16, heads=8, kv_heads=2),
            Case("prefix", [20] * 2, before=33, dim=16, heads=8, kv_heads=2),
            Case("windows", [75] * 2, heads=2, kv_heads=2, dim=16, causal=False),
        ]
    return [
        *(Case(f"prompt-{count}", [count]) for count in (512, 2016, 4064)),
        Case("prompts-560", [560] * 7 + [176]),
        Case("prefix-2048", [64] * 64, before=2048),
        *(Case(f"windows-{n}", [1500] * n, heads=20, kv_heads=20, dim=64, causal=False) for n in (16, 1)),
    ]


class Tensors:
    """Of one case. Keys and values stand in blocks, in any order, or as in a merged projection."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        self.case = case
        tokens, rows = sum(case.counts), len(case.counts)
        starts = [0, *accumulate(case.counts)]
        lengths = [count + case.before for count in case.counts]
        merged = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.dim, device=device).to(dtype)
        query, self.key, self.value = merged.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        self.query = query.contiguous()
        columns = -(-max(lengths) // BLOCK)
        self.cache = torch.randn(rows * columns, 2, BLOCK, case.kv_heads, case.dim, device=device).to(dtype)
        send = partial(torch.tensor, dtype=torch.int64, device=device)
        slots = [row for row, count in enumerate(case.counts) for _ in range(count)]
        positions = [case.before + i for count in case.counts for i in range(count)]
        tables = torch.randperm(rows * columns, device=device).view(rows, columns)
        self.batch = PagedBatch(
            starts, lengths, BLOCK, tables, send(list(range(rows))), send(starts), send(lengths), send(slots),
            send(positions),
        )  # fmt: skip
        SdpaAttention().write(self.key, self.value, self.cache, self.batch)
        self.rows = PackedRows(starts, torch.tensor(starts, dtype=torch.int32, device=device))
        self.options = AttentionOptions(case.dim**-0.5, causal=case.causal)

    def ours(self, variant: str, form: Form) -> Tensor:
        out = torch.empty_like(self.query)
        case, batch = self.case, self.batch
        if variant in ("described", "ahead"):
            pack = case.heads // case.kv_heads
            described = [
                TensorDescriptor.from_tensor(tensor.flatten(1), [form.tile, case.dim])
                for tensor in (self.key, self.value)
            ]
            programs = len(self.query) // (form.rows // pack) + len(case.counts)
            _attend_described[(case.kv_heads, programs)](
                self.query, *described, out, self.rows.row_starts, self.options.scale, len(case.counts), case.heads,
                pack, case.dim, form.rows, form.tile, case.causal, variant == "ahead",
                num_warps=form.warps, num_stages=form.stages, maxnreg=form.registers,
            )  # fmt: skip
            return out
        blocks = Blocks(batch.tables, batch.slots, batch.row_lengths, BLOCK)
        key, value, starts = self.cache[:, 0], self.cache[:, 1], batch.row_starts
        if variant == "packed":
            key, value, blocks, starts = self.key, self.value, None, self.rows.row_starts
        attend_tiles(self.query, key, value, out, starts, blocks, self.options, form)
        return out

    def exact(self) -> Tensor:
        if self.case.causal:
            return SdpaAttention().paged(self.query.float(), self.cache.float(), self.batch, self.options)
        return SdpaAttention().packed(self.query.float(), self.key.float(), self.value.float(), self.rows, self.options)

    def peers(self) -> Iterator[tuple[str, Callable[[], Tensor]]]:
        if self.case.before:
            yield "varlen, copied", self._varlen_copied
            return
        for backend in (VarlenAttention(), CudnnAttention(), Fa3Attention()):
            yield backend.name, partial(backend.packed, self.query, self.key, self.value, self.rows, self.options)
        if len(set(self.case.counts)) == 1:
            yield "flash, dense", partial(self._dense, SDPBackend.FLASH_ATTENTION)
            yield "cudnn, dense", partial(self._dense, SDPBackend.CUDNN_ATTENTION)

    def _dense(self, backend: SDPBackend) -> Tensor:
        """Rows of one length, as a batch that needs no padding."""
        rows = len(self.case.counts)
        query, key, value = (
            repeat_heads(self.query, tensor).unflatten(0, (rows, -1)).transpose(1, 2)
            for tensor in (self.query, self.key, self.value)
        )
        with sdpa_kernel(backend):
            out = scaled_dot_product_attention(query, key, value, is_causal=self.case.causal, scale=self.options.scale)
        return out.transpose(1, 2).flatten(0, 1)

    def _varlen_copied(self) -> Tensor:
        """The rows' blocks are copied together first."""
        from torch.nn.attention.varlen import varlen_attn

        batch, length = self.batch, self.batch.longest
        cached = self.cache[batch.tables.flatten()].unflatten(0, batch.tables.shape)  # (rows, columns, 2, block, ...)
        key, value = (cached[:, :, part].flatten(1, 2)[:, :length].flatten(0, 1) for part in (0, 1))
        edges = (batch.row_starts // self.case.counts[0] * length).to(torch.int32)
        return varlen_attn(
            self.query, key, value, self.rows.row_starts, edges, max(self.case.counts), length,
            scale=self.options.scale, window_size=(-1, 0), enable_gqa=True,
        )  # fmt: skip


def list_ours(case: Case) -> list[tuple[str, Form]]:
    listed = LLM if case.causal else WHISPER
    return [(variant, form) for variant, form in listed if variant == "blocks" or not case.before]


def clock(run: Callable[[], Tensor]) -> float:
    """Milliseconds of one launch of several in a row, the host's own time left out where it can be recorded."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    graph.replay()
    best = float("inf")
    for _ in range(TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / LAUNCHES)
    return best


def compile_some(part: int, parts: int) -> None:
    """Compile a share of the kernels, for the card, into Triton's cache."""
    with pretend_card() as card:
        card.compile = True
        jobs = []
        for causal in (True, False):
            case = next(case for case in list_cases(False) if case.causal is causal)
            jobs += [(case, *ours) for ours in list_ours(case)]
        for case, variant, form in jobs[part::parts]:
            small = Case(case.name, [64], 0, case.heads, case.kv_heads, case.dim, case.causal)
            try:
                Tensors(small, "cpu", torch.bfloat16).ours(variant, form)
            except Exception as error:
                print(f"{variant} {form}: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds after which nothing more is begun")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    arguments = parser.parse_args()
    began = time.perf_counter()

    def tell(line: dict[str, Any]) -> None:
        print(json.dumps(line), flush=True)
        if arguments.out is not None:
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")

    device, dtype = ("cpu", torch.float32) if arguments.tiny else ("cuda", torch.bfloat16)
    if not arguments.tiny:
        parts = arguments.processes
        with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_some, range(parts), [parts] * parts))
        tell({"compiled_s": round(time.perf_counter() - began, 1), "hardware": torch.cuda.get_device_name()})
    for case in list_cases(arguments.tiny):
        tensors = Tensors(case, device, dtype)
        exact = tensors.exact()
        runs = [
            (f"{variant} {'-'.join(map(str, filter(None, form)))}", partial(tensors.ours, variant, form))
            for variant, form in list_ours(case)
        ]
        if not arguments.tiny:
            runs += tensors.peers()
        for name, run in runs:
            if time.perf_counter() - began > arguments.limit:
                tell({"case": case.name, "form": name, "error": "no time left"})
                continue
            line: dict[str, Any] = {"case": case.name, "form": name}
            try:
                error = (run().float() - exact).norm() / exact.norm()
                line["error"] = float(error)
                if not arguments.tiny:
                    line["ms"] = clock(run)
                    line["tflops"] = round(case.flops / line["ms"] / 1e9, 1)
            except Exception as error:
                line["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            tell(line)
        del tensors, exact
    tell({"seconds": round(time.perf_counter() - began, 1)})


if __name__ == "__main__":
    main()
