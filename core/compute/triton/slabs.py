"""What one product made for many windows goes to each one's slab, in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from polymux.core.compute.device import send
from polymux.core.compute.triton.jit import kernel

FRAMES = 4
"""Frames of one program."""

EVEN = 16
"""Slabs begin at multiples of so many numbers: they are written in wide pieces."""


@kernel()
def _deal(projected, arena, begins, offset, frames, WIDTH: tl.constexpr, WIDE: tl.constexpr, FRAMES: tl.constexpr):
    window = tl.program_id(1)
    half = tl.program_id(2)
    each = tl.program_id(0) * FRAMES + tl.arange(0, FRAMES)
    columns = tl.arange(0, WIDE)
    mask = (each < frames)[:, None] & (columns < WIDTH)[None, :]
    rows = (window * frames + each).to(tl.int64) * 2 + half
    begin = tl.multiple_of(tl.load(begins + window) + offset, 16)
    values = tl.load(projected + rows[:, None] * WIDTH + columns[None, :], mask)
    tl.store(arena + begin + (half * frames + each)[:, None] * WIDTH + columns[None, :], values, mask)


class Dealer:
    """Writes into the slabs of one pass: views of one arena, (layers, 2, frames, heads, dim) each and without gaps."""

    def __init__(self, slabs: Sequence[Tensor]) -> None:
        first = slabs[0]
        self._stride = first.stride(0)
        self._arena = first.as_strided((1,), (1,), 0)
        self._begins = send(np.array([slab.storage_offset() for slab in slabs], np.int64), first.device)

    @staticmethod
    def fits(slabs: Sequence[Tensor]) -> bool:
        """Whether these are such slabs."""
        first = slabs[0]
        return all(
            slab.is_contiguous()
            and slab.untyped_storage().data_ptr() == first.untyped_storage().data_ptr()
            and slab.storage_offset() % EVEN == 0
            and slab.stride(0) % EVEN == 0
            for slab in slabs
        )

    def deal(self, projected: Tensor, layer: int) -> None:
        """(windows, frames, 2 * width), keys and values side by side, to one layer of each window's slab."""
        projected = projected.contiguous()
        windows, frames, both = projected.shape
        width = both // 2
        _deal[(triton.cdiv(frames, FRAMES), windows, 2)](
            projected,
            self._arena,
            self._begins,
            layer * self._stride,
            frames,
            width,
            triton.next_power_of_2(width),
            FRAMES,
            num_warps=8,
        )
