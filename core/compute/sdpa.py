"""The reference attention: gathers blocks, then torch's scaled_dot_product_attention, on any device.

Rows that bring one token are computed together, padded to the longest under a mask; rows that bring more, one by one.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, PagedBatch


@dataclass
class _Singles:
    """Rows of a launch that bring one token each."""

    places: Tensor
    """(R,): where their tokens stand in the packed batch."""
    blocks: Tensor
    """(R * columns,): the blocks of all rows, padded to the longest."""
    mask: Tensor
    """(R, 1, 1, columns * block) bool: the tokens each row may see."""

    @classmethod
    def of(cls, rows: list[int], batch: PagedBatch, size: int, window: int | None, device: torch.device) -> _Singles:
        lengths = torch.tensor([batch.lengths[row] for row in rows], device=device)[:, None]
        columns = -(-max(batch.lengths[row] for row in rows) // size)
        # a row is padded with a block of its own: a neighbour's values must not reach it, not even masked
        own = torch.minimum(torch.arange(columns, device=device)[None], (lengths - 1) // size)
        seen = torch.arange(columns * size, device=device)[None]
        mask = seen < lengths
        if window is not None:
            mask = mask & (seen >= lengths - window)
        return cls(
            places=torch.tensor([batch.starts[row] for row in rows], device=device),
            blocks=batch.tables[batch.slots[torch.tensor(rows, device=device)][:, None], own].reshape(-1),
            mask=mask[:, None, None],
        )


class SdpaAttention(AttentionBackend):
    name = "sdpa"

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        return None

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        out = torch.empty_like(query)
        for start, end in itertools.pairwise(rows.starts):
            out[start:end] = self._attend_row(query[start:end], key[start:end], value[start:end], options)
        return out

    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        keys, values = cache[:, 0], cache[:, 1]
        singles = self._singles(batch, cache.shape[2], options.window, query.device)
        if singles is not None and batch.decoding:
            return self._attend_singles(query, keys, values, singles, options)
        out = torch.empty_like(query)
        self._attend_chunks(query, cache, batch, options, out)
        if singles is not None:
            out[singles.places] = self._attend_singles(query[singles.places], keys, values, singles, options)
        return out

    def cross(self, query: Tensor, slabs: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        out = torch.empty_like(query)
        whole = replace(options, causal=False, window=None)
        units = batch.slab_units or [None] * len(batch.slabs)
        for row, slab in enumerate(batch.slabs):  # slabs are large: views, never gathered
            start, end = batch.starts[row], batch.starts[row + 1]
            key, value = slabs[slab][:, : units[row]].to(query.dtype)
            out[start:end] = self._attend_row(query[start:end], key, value, whole)
        return out

    def _attend_chunks(
        self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions, out: Tensor
    ) -> None:
        """The rows that bring more than one token, into their places of `out`."""
        for row, length in enumerate(batch.lengths):
            start, end = batch.starts[row], batch.starts[row + 1]
            if end - start > 1:
                blocks = batch.tables[batch.slots[row], : -(-length // cache.shape[2])]
                seen_keys = cache[:, 0][blocks].flatten(0, 1)[:length].to(query.dtype)
                seen_values = cache[:, 1][blocks].flatten(0, 1)[:length].to(query.dtype)
                out[start:end] = self._attend_row(query[start:end], seen_keys, seen_values, options)

    @staticmethod
    def _singles(batch: PagedBatch, size: int, window: int | None, device: torch.device) -> _Singles | None:
        """The rows that bring one token, worked out once a launch."""
        memo_key = ("sdpa", window)
        if memo_key not in batch.memo:
            rows = [row for row in range(len(batch.lengths)) if batch.starts[row + 1] - batch.starts[row] == 1]
            batch.memo[memo_key] = _Singles.of(rows, batch, size, window, device) if rows else None
        return batch.memo[memo_key]

    @staticmethod
    def _attend_singles(
        query: Tensor, keys: Tensor, values: Tensor, singles: _Singles, options: AttentionOptions
    ) -> Tensor:
        """One query per row, (R, heads, dim). A query's head group takes the place of the query length."""
        rows, heads, dim = query.shape
        kv_heads = keys.shape[2]
        shape = (rows, -1, kv_heads, dim)
        seen_keys = keys.index_select(0, singles.blocks).view(shape).transpose(1, 2).to(query.dtype)
        seen_values = values.index_select(0, singles.blocks).view(shape).transpose(1, 2).to(query.dtype)
        grouped = query.view(rows, kv_heads, heads // kv_heads, dim)
        if options.softcap is None and options.sinks is None:
            mixed = scaled_dot_product_attention(
                grouped, seen_keys, seen_values, attn_mask=singles.mask, scale=options.scale
            )
        else:
            sinks = options.sinks.view(1, kv_heads, -1, 1) if options.sinks is not None else None
            mixed = _attend_explicitly(grouped, seen_keys, seen_values, singles.mask, options, sinks)
        return mixed.reshape(rows, heads, dim)

    def _attend_row(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        """One row: its last len(query) positions attend to all of key and value. (L, heads, dim)."""
        heads, kv_heads = query.shape[1], key.shape[1]
        new, length = query.shape[0], key.shape[0]
        mask = self._mask(new, length, options, query.device)
        q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
        if options.softcap is None and options.sinks is None:
            whole = options.causal and mask is None
            mixed = scaled_dot_product_attention(
                q, k, v, attn_mask=mask, is_causal=whole, scale=options.scale, enable_gqa=heads != kv_heads
            )
        else:
            if mask is None:
                mask = torch.ones(new, length, dtype=torch.bool, device=query.device)
                mask = mask.tril() if options.causal else mask
            k, v = (tensor.repeat_interleave(heads // kv_heads, dim=1) for tensor in (k, v))
            sinks = options.sinks.view(1, heads, 1, 1) if options.sinks is not None else None
            mixed = _attend_explicitly(q, k, v, mask, options, sinks)
        return mixed[0].transpose(0, 1)

    @staticmethod
    def _mask(new: int, length: int, options: AttentionOptions, device: torch.device) -> Tensor | None:
        """None where torch's own causal flag (or no mask at all) says the same."""
        windowed = options.window is not None and options.window < length
        if not windowed and (not options.causal or new == length):
            return None
        queries = torch.arange(length - new, length, device=device)[:, None]
        keys = torch.arange(length, device=device)[None]
        mask = keys <= queries if options.causal else torch.ones(new, length, dtype=torch.bool, device=device)
        if options.window is not None:
            mask = mask & (queries - keys < options.window)
            if not options.causal:
                mask = mask & (keys - queries < options.window)
        return mask


def _attend_explicitly(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, options: AttentionOptions, sinks: Tensor | None
) -> Tensor:
    """Softmax attention with a cap on the scores (Gemma 2, section 3) and attention sinks (gpt-oss)."""
    scores = (query @ key.transpose(-1, -2)).float() * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        scores = torch.cat([scores, sinks.float().expand(*scores.shape[:-1], 1)], dim=-1)
    weights = scores.softmax(dim=-1)
    if sinks is not None:
        weights = weights[..., :-1]
    return weights.to(value.dtype) @ value
