"""Attention of others inside packed rows: torch's variable-length kernels, cuDNN, FlashAttention-3, xformers.

Each claims what its interface can say; whether this build really does it, a probe finds out.
"""

from __future__ import annotations

import importlib
import inspect
from abc import abstractmethod

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, PagedBatch
from polymux.core.compute.packed.probe import try_packed
from polymux.core.errors import InternalError


class PackedBackend(AttentionBackend):
    """A backend for rows that see only themselves."""

    pages = False
    package: str | None = None
    """The module it needs, where that is not torch."""

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        if device.type != "cuda":
            return "it needs a CUDA device"
        if dtype not in (torch.bfloat16, torch.float16):
            return f"it does not compute in {dtype}"
        if self.package is not None:
            try:
                importlib.import_module(self.package)
            except Exception as error:  # a build for another torch fails in any way
                return f"{self.package} does not import: {error}"
        reasons = [
            try_packed(self, device, dtype, dim, AttentionOptions(1.0, causal=causal)) for causal in (True, False)
        ]
        return reasons[0] if all(reasons) else None

    @abstractmethod
    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        pass

    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        raise InternalError(f"attention {self.name} does not read blocks")

    def cross(self, query: Tensor, slabs: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        raise InternalError(f"attention {self.name} does not read slabs")


class VarlenAttention(PackedBackend):
    """torch.nn.attention.varlen: FlashAttention over rows of any lengths."""

    name = "varlen"

    def claims(self, options: AttentionOptions) -> bool:
        return options.softcap is None and options.sinks is None

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        from torch.nn.attention.varlen import varlen_attn

        grouped = {}
        if query.shape[1] != key.shape[1]:
            if "enable_gqa" in inspect.signature(varlen_attn).parameters:
                grouped = {"enable_gqa": True}
            else:
                key, value = repeat_heads(query, key), repeat_heads(query, value)
        edges, longest = rows.edges(query.device), rows.longest
        sides = read_sides(options)
        return varlen_attn(
            query, key, value, edges, edges, longest, longest, scale=options.scale, window_size=sides, **grouped
        )


class Fa3Attention(PackedBackend):
    """FlashAttention-3 (Shah et al., 2024), as the forward-only wheel `fa3_fwd` brings it."""

    name = "fa3"
    package = "fa3_fwd_interface"

    def claims(self, options: AttentionOptions) -> bool:
        return options.sinks is None

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        module = importlib.import_module("fa3_fwd_interface")
        edges, longest = rows.edges(query.device), rows.longest
        left, right = read_sides(options) if options.window is not None else (-1, -1)
        out = module.flash_attn_varlen_func(
            query,
            key,
            value,
            edges,
            edges,
            longest,
            longest,
            softmax_scale=options.scale,
            causal=options.causal,
            window_size=(left, right),
            softcap=options.softcap or 0.0,
        )
        return out[0] if isinstance(out, tuple) else out


class XformersAttention(PackedBackend):
    """xformers' memory-efficient attention over block-diagonal masks."""

    name = "xformers"
    package = "xformers.ops"

    def claims(self, options: AttentionOptions) -> bool:
        return options.softcap is None and options.sinks is None and (options.window is None or options.causal)

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        memo = ("xformers", options.causal, options.window)
        if memo not in rows.memo:
            masks = importlib.import_module("xformers.ops.fmha.attn_bias")
            mask = masks.BlockDiagonalMask.from_seqlens([b - a for a, b in zip(rows.starts, rows.starts[1:])])
            if options.window is not None:
                mask = mask.make_local_attention(options.window)
            elif options.causal:
                mask = mask.make_causal()
            rows.memo[memo] = mask
        key, value = repeat_heads(query, key), repeat_heads(query, value)
        attend = importlib.import_module("xformers.ops").memory_efficient_attention
        return attend(query[None], key[None], value[None], attn_bias=rows.memo[memo], scale=options.scale)[0]


class CudnnAttention(PackedBackend):
    """cuDNN over a dense batch. It makes a plan for every new length, so lengths are rounded up to a few."""

    name = "cudnn"
    kernels = (SDPBackend.CUDNN_ATTENTION,)

    def claims(self, options: AttentionOptions) -> bool:
        return options.softcap is None and options.sinks is None and options.window is None

    def packed(self, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: AttentionOptions) -> Tensor:
        if "dense" not in rows.memo:
            rows.memo["dense"] = _find_places(rows, query.device)
        places, mask = rows.memo["dense"]
        count, length = len(rows.starts) - 1, bucket(rows.longest)
        tensors = (query, repeat_heads(query, key), repeat_heads(query, value))
        dense = [_spread(tensor, places, count, length) for tensor in tensors]
        # behind a causal mask no query sees the padding, which comes last
        with sdpa_kernel(list(self.kernels)):
            mixed = scaled_dot_product_attention(
                *dense,
                attn_mask=None if options.causal else mask,
                is_causal=options.causal,
                scale=options.scale,
            )
        mixed = mixed.transpose(1, 2).flatten(0, 1)
        return mixed if places is None else mixed[places]


def _find_places(rows: PackedRows, device: torch.device) -> tuple[Tensor | None, Tensor | None]:
    """Where the tokens stand in a dense batch, (T,), and which keys are no padding; None where none is needed."""
    lengths = torch.tensor(rows.starts).diff()
    length = bucket(rows.longest)
    if bool((lengths == length).all()):
        return None, None
    total = rows.starts[-1]
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    places = torch.arange(total) - torch.tensor(rows.starts)[numbers] + numbers * length
    mask = (torch.arange(length)[None] < lengths[:, None])[:, None, None].expand(-1, 1, length, -1)
    return places.to(device), mask.to(device)


def _spread(packed: Tensor, places: Tensor | None, count: int, length: int) -> Tensor:
    """(T, heads, dim) to (rows, heads, length, dim)."""
    if places is not None:
        packed = packed.new_zeros(count * length, *packed.shape[1:]).index_copy_(0, places, packed)
    return packed.unflatten(0, (count, length)).transpose(1, 2)


def bucket(length: int) -> int:
    """A length rounded up to a step of an eighth of its magnitude, at least 64."""
    step = max(64, 1 << max(length.bit_length() - 4, 0))
    return -(-length // step) * step


def read_sides(options: AttentionOptions) -> tuple[int, int]:
    """How many keys a query sees before and behind itself; -1: all."""
    left = -1 if options.window is None else options.window - 1
    return left, 0 if options.causal else left


def repeat_heads(query: Tensor, tensor: Tensor) -> Tensor:
    """Keys or values with as many heads as the queries."""
    group = query.shape[1] // tensor.shape[1]
    return tensor if group == 1 else tensor.repeat_interleave(group, dim=1)


PACKED_BACKENDS: tuple[PackedBackend, ...] = (
    VarlenAttention(),
    CudnnAttention(),
    Fa3Attention(),
    XformersAttention(),
)
