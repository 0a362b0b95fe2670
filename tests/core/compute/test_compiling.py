"""Kernels that no stage's rehearsal launches in all their forms: what Triton or the assembler would refuse on a card,
it refuses here."""

from __future__ import annotations

import os

import pytest
import torch

from polymux.core.compute.attention import AttentionOptions

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from polymux.core.compute.triton.packed import attend_packed
from polymux.core.compute.triton.prefill import attend_chunks
from polymux.core.testing.card import pretend_card

HEADS, KV_HEADS, BLOCK = 8, 2, 16
OPTIONS = {
    "plain": AttentionOptions(0.1),
    "everything": AttentionOptions(0.1, window=80, softcap=2.0, sinks=torch.zeros(HEADS)),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "kind", "dims"),
    [
        (torch.bfloat16, "plain", (64, 128, 256)),
        (torch.bfloat16, "everything", (128,)),
        (torch.float32, "plain", (256,)),
    ],
    ids=str,
)
def test_attention_of_many_queries_compiles_for_a_hopper(dtype: torch.dtype, kind: str, dims: tuple[int, ...]) -> None:
    starts, one = torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    tables = torch.zeros(1, 40, dtype=torch.int64)
    with pretend_card() as card:
        card.compile = True
        for dim in dims:
            for tokens in (8, 500):
                query = torch.empty(tokens, HEADS, dim, dtype=dtype)
                key, value = query[:, :KV_HEADS], query[:, KV_HEADS : 2 * KV_HEADS]
                cache = torch.empty(40, 2, BLOCK, KV_HEADS, dim, dtype=dtype)
                out = torch.empty_like(query)
                attend_chunks(query, cache, tables, one, starts, one, BLOCK, OPTIONS[kind], out)
                attend_packed(query, key, value, starts.to(torch.int32), OPTIONS[kind])
    assert card.compiled and all(kernel.asm["cubin"] for kernel in card.compiled.values())
