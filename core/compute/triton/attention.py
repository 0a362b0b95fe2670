"""Attention for CUDA in our own kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, PagedBatch
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.compute.triton.decode import attend_singles
from polymux.core.compute.triton.packed import attend_packed
from polymux.core.compute.triton.prefill import attend_chunks
from polymux.core.compute.triton.single import PROGRAMS, attend_slab

FEW_TOKENS = 16
"""Tokens of a row up to which each reads the row's slab by itself."""


class TritonAttention(AttentionBackend):
    name = "triton"
    recordable = True

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        if device.type != "cuda":
            return "it needs a CUDA device"
        if dtype not in (torch.bfloat16, torch.float16, torch.float32):
            return f"it does not compute in {dtype}"
        if not 16 <= dim <= 256:
            return f"heads of {dim} are not between 16 and 256"
        return None

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        return attend_packed(query, key, value, rows.edges(query.device), options)

    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        if batch.decoding:
            return attend_singles(
                query,
                cache,
                batch.tables,
                batch.slots,
                batch.row_lengths,
                batch.block,
                batch.longest,
                options,
                batch.shared,
            )
        out = torch.empty_like(query)
        singles = batch.singles
        if singles:  # rows of no length, in a recorded launch, leave zeros in places that are written after them
            attend_singles(
                query[:singles],
                cache,
                batch.tables,
                batch.slots[:singles],
                batch.row_lengths[:singles],
                batch.block,
                batch.longest,
                options,
                out=out[:singles],
            )
        attend_chunks(
            query,
            cache,
            batch.tables,
            batch.slots[singles:],
            batch.row_starts[singles:],
            batch.row_lengths[singles:],
            batch.block,
            options,
            out,
        )
        return out

    def cross(self, query: Tensor, slabs: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        if batch.slab_table is None or batch.largest > FEW_TOKENS:
            return SdpaAttention().cross(query, slabs, batch, options)
        tokens, heads, dim = query.shape
        count = batch.even
        if count > 1 and heads == slabs.shape[3]:  # one reading serves all tokens of a row, as heads of one group
            asked = query.view(-1, count, heads, dim).transpose(1, 2).reshape(-1, heads * count, dim)
            mixed = self._cross(asked, slabs, batch, batch.slots, options)
            return mixed.view(-1, heads, count, dim).transpose(1, 2).reshape(tokens, heads, dim)
        if heads == slabs.shape[3] and tokens * heads < PROGRAMS and options.softcap is None and options.sinks is None:
            if "slabs" not in batch.memo:
                batch.memo["slabs"] = batch.slab_table[batch.token_slots, 0]
            return attend_slab(query, slabs, batch.memo["slabs"], options.scale)
        # nothing is masked, so every token is a row of its own
        return self._cross(query, slabs, batch, batch.token_slots, options)

    @staticmethod
    def _cross(query: Tensor, slabs: Tensor, batch: PagedBatch, slots: Tensor, options: AttentionOptions) -> Tensor:
        """(R, heads, dim) queries of rows in these slots, (R,), to all of their slabs."""
        frames = slabs.shape[2]
        if "frames" not in batch.memo:
            batch.memo["frames"] = torch.full_like(slots, frames)
        return attend_singles(query, slabs, batch.slab_table, slots, batch.memo["frames"], frames, frames, options)
