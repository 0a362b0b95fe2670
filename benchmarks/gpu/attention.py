"""Attention of many queries on a CUDA card: our kernel in several forms, and torch's on the same tokens.

prompt-512, -2016, -4064   one prompt, 32 query heads on 8 key heads of 128, causal, in blocks
prompts-560                4,096 tokens in prompts of 560
prefix-2048                64 rows that bring 64 tokens each behind 2,048 cached ones
wide-2016                  one prompt, 8 query heads on 4 key heads of 256
texts                      packed rows of 128, 16 query heads on 8 key heads of 128, causal
windows-16, windows-1      packed rows of 1,500, 20 heads of 64, not causal

Forms of ours are rows, tile, warps, stages and the most registers of a thread where that is bounded; the first is the
engine's own choice. Milliseconds of one layer, TFLOP/s of what has to be computed, and how far from the reference in
fp32.

PYTHONPATH=benchmarks python benchmarks/gpu/attention.py --out attention.jsonl
With TRITON_INTERPRET=1 and --tiny: small rows on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import inspect
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from trials import Trials

from polymux.core.compute.attention import AttentionOptions, PackedRows
from polymux.core.compute.packed.backends import CudnnAttention, Fa3Attention, VarlenAttention, repeat_heads
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.compute.triton.forms import Form
from polymux.core.compute.triton.tiles import Blocks, attend_tiles
from polymux.core.testing.card import pretend_card
from polymux.core.testing.rows import lay_out

BLOCK = 16

OTHERS = {
    256: [Form(64, 32, 8, 2, 128), Form(128, 64, 8, 2)],
    128: [Form(128, 64, 8, 2, 128), Form(128, 32, 8, 3, 128), Form(128, 32, 8, 6, 128), Form(128, 64, 8, 2)],
    64: [Form(128, 64, 8, 2, 128), Form(64, 64, 4, 3)],
}
"""By the heads' dimension: forms beside the one that the engine chooses."""


@dataclass(frozen=True)
class Case:
    name: str
    counts: tuple[int, ...]
    before: int = 0
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    causal: bool = True
    blocks: bool = True
    """Keys and values stand in blocks, in any order; else where a merged projection left them."""

    @property
    def flops(self) -> float:
        pairs = 0
        for count in self.counts:
            pairs += count * self.before + (count * (count + 1) // 2 if self.causal else count * count)
        return 4.0 * pairs * self.heads * self.dim


def list_cases(tiny: bool) -> list[Case]:
    if tiny:
        small = {"heads": 8, "kv_heads": 2, "dim": 64}
        return [
            Case("prompt", (150,), **small),
            Case("prompts", (40, 40, 9), **small),
            Case("prefix", (20, 20), before=33, **small),
            Case("windows", (75, 75), 0, 2, 2, 64, causal=False, blocks=False),
        ]
    return [
        *(Case(f"prompt-{count}", (count,)) for count in (512, 2016, 4064)),
        Case("prompts-560", (560,) * 7 + (176,)),
        Case("prefix-2048", (64,) * 64, before=2048),
        Case("wide-2016", (2016,), 0, 8, 4, 256),
        Case("texts", (128,) * 32, 0, 16, 8, 128, blocks=False),
        *(Case(f"windows-{n}", (1500,) * n, 0, 20, 20, 64, causal=False, blocks=False) for n in (16, 1)),
    ]


class Tensors:
    """Of one case."""

    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        self.case = case
        tokens, befores = sum(case.counts), [case.before] * len(case.counts)
        self.batch, blocks = lay_out(case.counts, befores, BLOCK, device)
        merged = torch.randn(tokens, case.heads + 2 * case.kv_heads, case.dim, device=device).to(dtype)
        query, self.key, self.value = merged.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
        self.query = query.contiguous()
        self.cache = torch.randn(blocks, 2, BLOCK, case.kv_heads, case.dim, device=device).to(dtype)
        SdpaAttention().write(self.key, self.value, self.cache, self.batch)
        self.rows = PackedRows(self.batch.starts, self.batch.row_starts.to(torch.int32))
        self.options = AttentionOptions(case.dim**-0.5, causal=case.causal)

    def ours(self, form: Form | None) -> Tensor:
        out, batch = torch.empty_like(self.query), self.batch
        if self.case.blocks:
            blocks = Blocks(batch.tables, batch.slots, batch.row_lengths, BLOCK)
            key, value = self.cache[:, 0], self.cache[:, 1]
            attend_tiles(self.query, key, value, out, batch.row_starts, blocks, self.options, form)
        else:
            attend_tiles(self.query, self.key, self.value, out, self.rows.row_starts, None, self.options, form)
        return out

    def exact(self) -> Tensor:
        if self.case.blocks:
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
        grouped = {"enable_gqa": True} if "enable_gqa" in inspect.signature(varlen_attn).parameters else {}
        if not grouped:
            key, value = repeat_heads(self.query, key), repeat_heads(self.query, value)
        return varlen_attn(
            self.query, key, value, self.rows.row_starts, edges, max(self.case.counts), length,
            scale=self.options.scale, window_size=(-1, 0), **grouped,
        )  # fmt: skip


def list_ours(case: Case) -> list[tuple[str, Form | None]]:
    others = [("-".join(map(str, filter(None, form))), form) for form in OTHERS[case.dim]]
    return [("ours", None), *others]


def compile_some(part: int, parts: int) -> None:
    """Compile a share of the kernels, for the card, into Triton's cache."""
    with pretend_card() as card:
        card.compile = True
        small = {replace(case, name="", counts=(512,), before=0): None for case in list_cases(False)}
        jobs = [(case, form) for case in small for _, form in list_ours(case)]
        for case, form in jobs[part::parts]:
            try:
                Tensors(case, "cpu", torch.bfloat16).ours(form)
            except Exception as error:
                print(f"{case} {form}: {type(error).__name__}: {error}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds after which nothing more is begun")
    parser.add_argument("--processes", type=int, default=12, help="that compile")
    arguments = parser.parse_args()
    trials = Trials(arguments.out, arguments.tiny, arguments.limit)
    device, dtype = ("cpu", torch.float32) if arguments.tiny else ("cuda", torch.bfloat16)
    if not arguments.tiny:
        parts = arguments.processes
        with ProcessPoolExecutor(parts, mp_context=multiprocessing.get_context("spawn")) as pool:
            list(pool.map(compile_some, range(parts), [parts] * parts))
        trials.tell(compiled_s=round(trials.seconds, 1), hardware=torch.cuda.get_device_name())
    for case in list_cases(arguments.tiny):
        tensors = Tensors(case, device, dtype)
        exact = tensors.exact()
        runs = [(name, partial(tensors.ours, form)) for name, form in list_ours(case)]
        if not arguments.tiny:
            runs += tensors.peers()
        flops = case.flops
        trials.run(case.name, runs, exact, lambda ms: {"ms": ms, "tflops": round(flops / ms / 1e9, 1)})  # noqa: B023
        del tensors, exact
    trials.tell(seconds=round(trials.seconds, 1))


if __name__ == "__main__":
    main()
