"""Every kernel of ours a few times on small ragged inputs, with nothing else around: for compute-sanitizer.

compute-sanitizer --tool memcheck python benchmarks/gpu/sanitize.py
TRITON_INTERPRET=1 python benchmarks/gpu/sanitize.py      (without a card)
"""

from __future__ import annotations

import os
from itertools import product

import torch

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.compute.triton.decode import attend_singles
from polymux.core.compute.triton.draw import draw
from polymux.core.compute.triton.fused import add_norm, gate
from polymux.core.compute.triton.layer_norm import add_layer_norm
from polymux.core.compute.triton.linear import multiply
from polymux.core.compute.triton.packed import attend_packed
from polymux.core.compute.triton.rotary import rotate_heads, rotate_write
from polymux.core.compute.triton.turn import turn
from polymux.core.testing.rows import lay_out

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (torch.float32, torch.bfloat16) if DEVICE == "cuda" else (torch.float32,)
BLOCK = 16


def run_paged(dtype: torch.dtype, dim: int, options: AttentionOptions) -> None:
    attention = TritonAttention()
    for counts, befores in (
        ([1, 1, 1], [0, 130, 37]),
        ([1, 5, 70, 129], [300, 0, 33, 0]),
        ([3, 1], [0, 0]),
        ([1] * 12, [65] * 12),
    ):
        counts, befores = map(list, zip(*sorted(zip(counts, befores), key=lambda pair: pair[0] > 1)))
        batch, blocks = lay_out(counts, befores, BLOCK, DEVICE)
        cache = torch.randn(blocks, 2, BLOCK, 2, dim, device=DEVICE).to(dtype)
        merged = torch.randn(sum(counts), 8, dim, device=DEVICE).to(dtype)
        table = torch.randn(2, 512, dim, device=DEVICE)
        query = rotate_write(merged, 4, 2, (table, batch.positions), None, cache, batch)
        found = attention.paged(query, cache, batch, options)
        if not found.isfinite().all():
            raise RuntimeError("attention is not finite")
        if batch.decoding and options.window is None:
            shared = torch.tensor([BLOCK if min(befores) >= BLOCK else 0], device=DEVICE)
            attend_singles(
                query, cache, batch.tables, batch.slots, batch.row_lengths, BLOCK, batch.longest, options, shared
            )


def run_others(dtype: torch.dtype) -> None:
    x = torch.randn(5, 96, device=DEVICE).to(dtype)
    weight, bias = torch.randn(96, device=DEVICE).to(dtype), torch.randn(96, device=DEVICE).to(dtype)
    add_norm(x, None, weight, 1e-6)
    add_norm(x, x.clone(), weight, 1e-6)
    add_layer_norm(x, x.clone(), weight, bias, 1e-6)
    gate(torch.randn(3, 2 * 700, device=DEVICE).to(dtype), "silu")
    gate(torch.randn(3, 2 * 33, device=DEVICE).to(dtype), "gelu_tanh")
    for rows in range(1, 5):
        multiply(x[:rows], torch.randn(37, 96, device=DEVICE).to(dtype), None)
    merged = torch.randn(7, 5, 24, device=DEVICE).to(dtype)
    norms = (torch.randn(24, device=DEVICE), torch.randn(24, device=DEVICE), 1e-6)
    rotate_heads(merged, 2, 1, (torch.randn(2, 9, 24, device=DEVICE), torch.arange(7, device=DEVICE)), norms)
    turned = torch.randn(7, 3, 5, 24, device=DEVICE).to(dtype)
    turn(turned, torch.randn(7, 24, device=DEVICE), torch.randn(7, 24, device=DEVICE))
    slots = torch.arange(4, device=DEVICE)
    temperatures = torch.tensor([0.0, 1.0, 0.5, 2.0], device=DEVICE)
    tokens, finite = draw(torch.randn(4, 5000, device=DEVICE).to(dtype), temperatures, slots + 3, slots, slots)
    if not (finite.all() and (tokens < 5000).all()):
        raise RuntimeError("what was drawn is no token")


def main() -> None:
    torch.manual_seed(0)
    for dtype in DTYPES:
        run_others(dtype)
        for dim, options in product(
            (16, 80) if os.environ.get("TRITON_INTERPRET") == "1" else (16, 80, 128, 256),
            (AttentionOptions(0.1), AttentionOptions(0.1, window=20, softcap=5.0)),
        ):
            run_paged(dtype, dim, options)
            merged = torch.randn(90, 8, dim, device=DEVICE).to(dtype)
            starts = torch.tensor([0, 1, 70, 90], dtype=torch.int32, device=DEVICE)
            attend_packed(*merged.split([4, 2, 2], dim=1), starts, options)
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    print("every kernel ran", flush=True)


if __name__ == "__main__":
    main()
