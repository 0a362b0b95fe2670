"""How the compiled CPU kernels are called: tensors in, tensors out. All are float32 and contiguous but the cache."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions, PagedBatch
from polymux.core.compute.native import KernelUnavailable, load_avx2_library

if TYPE_CHECKING:
    from polymux.core.compute.fast.structure import Norm

log = logging.getLogger("polymux.compute")

GATES = {"silu": 0, "gelu_tanh": 1}

LARGEST_HEAD = 256

_POINTER, _SIZE, _FLOAT, _INT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float, ctypes.c_int
_CACHE = (_POINTER, *[_SIZE] * 5)
_SIGNATURES = {
    "polymux_add_norm": ((*[_POINTER] * 3, _FLOAT, _SIZE, _SIZE, _POINTER, _INT), None),
    "polymux_gate": ((_POINTER, _INT, _SIZE, _SIZE, _POINTER, _INT), None),
    "polymux_add_low_rank": (
        (
            *(_POINTER, _SIZE, _SIZE),  # x, rows, inputs
            *(_POINTER, _SIZE, _POINTER, _SIZE),  # down, rank, up, outputs
            *(_POINTER, _SIZE, _INT),  # out, its step, threads
        ),
        _INT,
    ),
    "polymux_rotate_write": (
        (
            *(_POINTER, _SIZE, _SIZE),  # merged, tokens, heads
            *(_POINTER, _FLOAT, _POINTER, _FLOAT),  # norms of queries and keys
            *(_POINTER, _POINTER, _POINTER, _POINTER),  # cosines, sines, their rows, positions
            *(*_CACHE, _POINTER, _SIZE, _POINTER),  # cache, tables, columns, slots
            *(_POINTER, _INT),  # query, threads
        ),
        None,
    ),
    "polymux_attend": (
        (
            *(_POINTER, _SIZE, _SIZE),  # query, rows, heads
            *(*_CACHE, _POINTER, _SIZE, _POINTER, _POINTER),  # cache, tables, columns, slots, lengths
            *(_FLOAT, _SIZE, _FLOAT, _POINTER),  # scale, window, softcap, sinks
            *(_POINTER, _INT),  # out, threads
        ),
        _INT,
    ),
}


class CpuKernels:
    """The library of this process. Raises `KernelUnavailable` where it cannot be built or run."""

    def __init__(self) -> None:
        library = load_avx2_library(Path(__file__).with_name("kernels.cpp"))
        for name, (arguments, result) in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes, function.restype = arguments, result
        self._add_norm = library.polymux_add_norm
        self._gate = library.polymux_gate
        self._add_low_rank = library.polymux_add_low_rank
        self._rotate_write = library.polymux_rotate_write
        self._attend = library.polymux_attend

    def add_norm(self, x: Tensor, residual: Tensor | None, norm: Norm) -> Tensor:
        """RMS norm of x + residual, (T, d); `residual` itself becomes the sum."""
        rows, width = x.shape
        out = torch.empty_like(x)
        self._add_norm(
            x.data_ptr(),
            None if residual is None else residual.data_ptr(),
            norm.weight.data_ptr(),
            norm.eps,
            rows,
            width,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        return out

    def gate(self, gate_up: Tensor, kind: str) -> Tensor:
        """act(gate) * up from (T, 2 i): (T, i)."""
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty(rows, width)
        self._gate(gate_up.data_ptr(), GATES[kind], rows, width, out.data_ptr(), torch.get_num_threads())
        return out

    def add_low_rank(self, out: Tensor, x: Tensor, down: Tensor, up: Tensor) -> None:
        """out (T, o) += x (T, i) @ down.T @ up.T; `down` is (rank, i), `up` (o, rank), all but `out` contiguous."""
        failed = self._add_low_rank(
            x.data_ptr(),
            *x.shape,
            down.data_ptr(),
            down.shape[0],
            up.data_ptr(),
            up.shape[0],
            out.data_ptr(),
            out.stride(0),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for an adapter's inner values")

    def rotate_write(
        self,
        merged: Tensor,
        heads: int,
        norms: tuple[Norm, Norm] | None,
        table: Tensor,
        turns: Tensor,
        cache: Tensor,
        batch: PagedBatch,
    ) -> Tensor:
        """From (T, heads + 2 kv heads, dim): queries (T, heads, dim), normed and rotated; keys and values go into
        one layer's `cache`. `table` holds cosines and sines, (2, positions, dim), `turns` (T,) each token's row."""
        tokens, _, dim = merged.shape
        query = merged.new_empty(tokens, heads, dim)
        query_norm, key_norm = norms or (None, None)
        self._rotate_write(
            merged.data_ptr(),
            tokens,
            heads,
            None if query_norm is None else query_norm.weight.data_ptr(),
            0.0 if query_norm is None else query_norm.eps,
            None if key_norm is None else key_norm.weight.data_ptr(),
            0.0 if key_norm is None else key_norm.eps,
            table.data_ptr(),
            table.data_ptr() + table.stride(0) * 4,
            turns.data_ptr(),
            batch.positions.data_ptr(),
            *_describe(cache),
            batch.tables.data_ptr(),
            batch.tables.shape[1],
            batch.token_slots.data_ptr(),
            query.data_ptr(),
            torch.get_num_threads(),
        )
        return query

    def attend(
        self, query: Tensor, cache: Tensor, tables: Tensor, slots: Tensor, lengths: Tensor, options: AttentionOptions
    ) -> Tensor:
        """Each query, (T, heads, dim), against the first `lengths` (T,) tokens of its row in one layer's `cache`: the
        row's blocks stand in `tables` (slots, columns) at its slot, `slots` (T,). The query's own place is the last
        one. All int64."""
        rows, heads, _ = query.shape
        out = torch.empty_like(query)
        failed = self._attend(
            query.data_ptr(),
            rows,
            heads,
            *_describe(cache),
            tables.data_ptr(),
            tables.shape[1],
            slots.data_ptr(),
            lengths.data_ptr(),
            options.scale,
            options.window or 0,
            options.softcap or 0.0,
            None if options.sinks is None else options.sinks.data_ptr(),
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the scores of attention")
        return out


def _describe(cache: Tensor) -> tuple[int, int, int, int, int, int]:
    """(blocks, 2, block, kv heads, dim) of one layer, as the kernels take it."""
    _, _, block, kv_heads, dim = cache.shape
    return cache.data_ptr(), cache.stride(0), cache.stride(1), block, kv_heads, dim


@functools.cache
def load_cpu_kernels() -> CpuKernels | None:
    """The kernels of this process; None, with one warning, where they cannot be built or run."""
    try:
        return CpuKernels()
    except KernelUnavailable as error:
        log.warning("decoder layers run on torch's slower operators: %s", error.message)
        return None
