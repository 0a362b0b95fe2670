"""How our kernels are compiled: for each set of constants once, whatever launch they are needed in.

Triton also makes a kernel anew for pointers of another alignment. Indices of a launch are slices of one upload and
begin anywhere, so that would be a kernel compiled in the middle of somebody's answer; and an index is read one at a
time, where alignment gains nothing.
"""

from __future__ import annotations

from functools import partial

import triton

INDICES = (
    "lengths",
    "positions",
    "prefix",
    "seeds",
    "shared",
    "slots",
    "starts",
    "tables",
    "temperatures",
    "turns",
)
"""Names of parameters that point to such numbers, in all kernels."""

COUNTS = ("count", "parts", "rows", "splits")
"""Names of numbers that differ from launch to launch."""

kernel = partial(triton.jit, do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDICES)
"""`triton.jit` for a kernel, as `@kernel()`."""
