"""The compiled int8 product behind `Int8Linear`: how weights are packed for it and how it is called."""

from __future__ import annotations

import ctypes
import functools
import logging
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import pad

from polymux.core.compute.native import KernelUnavailable, load_avx2_library

log = logging.getLogger("polymux.compute")

PANEL = 16
"""Output columns of a panel."""

LARGEST_CODE = 2**15 - 1
LARGEST_SUM = 2**31 - 1


class Int8Kernel:
    """Product of float32 rows and packed int8 weights: int16 activations, exact int32 sums, AVX2."""

    def __init__(self) -> None:
        library = load_avx2_library(Path(__file__).with_name("int8_kernel.cpp"))
        pointer, size = ctypes.c_void_p, ctypes.c_int64
        self._multiply = library.polymux_int8_linear
        self._multiply.argtypes = [
            *(pointer, size),  # x, rows
            *(pointer, pointer, pointer, size, size),  # panels, scales, bias, columns, inputs
            *(ctypes.c_float, pointer, ctypes.c_int),  # limit, out, threads
        ]
        self._multiply.restype = ctypes.c_int

    def pack(self, codes: Tensor) -> Tensor:
        """int8 (out, in) -> int8 (panels, pairs, 16, 2), padded with zeros: see int8_kernel.cpp."""
        columns, inputs = codes.shape
        padded = pad(codes, (0, inputs % 2, 0, -columns % PANEL))
        return padded.view(-1, PANEL, padded.shape[1] // 2, 2).transpose(1, 2).contiguous()

    def multiply(self, x: Tensor, panels: Tensor, scales: Tensor, bias: Tensor | None, limit: int) -> Tensor:
        """float32 (rows, in) -> float32 (rows, out). All tensors are contiguous; scales and bias are (out,)."""
        rows, inputs = x.shape
        columns = scales.shape[0]
        out = torch.empty(rows, columns)
        failed = self._multiply(
            x.data_ptr(),
            rows,
            panels.data_ptr(),
            scales.data_ptr(),
            None if bias is None else bias.data_ptr(),
            columns,
            inputs,
            limit,
            out.data_ptr(),
            torch.get_num_threads(),
        )
        if failed:
            raise MemoryError("no memory for the quantized activations of an int8 linear layer")
        return out


def find_limit(codes: Tensor) -> int:
    """The largest activation code for which no sum over these weights, int8 (out, in), can leave int32."""
    largest = int(codes.abs().sum(dim=1, dtype=torch.int64).max())
    return min(LARGEST_CODE, LARGEST_SUM // max(largest, 1))


@functools.cache
def load_int8_kernel() -> Int8Kernel | None:
    """The kernel of this process; None, with one warning, where it cannot be built or run."""
    try:
        return Int8Kernel()
    except KernelUnavailable as error:
        log.warning("int8 linear layers run on torch's slower operator: %s", error.message)
        return None
