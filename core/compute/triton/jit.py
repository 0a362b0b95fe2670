"""How our kernels are compiled: for each set of constants once, whatever launch they are needed in.

Triton also makes a kernel anew for pointers of another alignment. Indices of a launch are slices of one upload and
begin anywhere, so that would be a kernel compiled in the middle of somebody's answer; and an index is read one at a
time, where alignment gains nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import triton
from triton.runtime.jit import JITFunction

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


class Kernel(JITFunction):
    """A kernel that can be compiled without being launched."""


def _compile(kernel: Kernel, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
    return super(Kernel, kernel).run(*args, grid=grid, warmup=True, **options)


@contextmanager
def skip_launches() -> Iterator[None]:
    """Inside, our kernels are compiled where they would be launched. For the one thread that launches any."""
    Kernel.run = _compile  # an attribute of the class, so that launches outside pay nothing for it
    try:
        yield
    finally:
        del Kernel.run


def kernel() -> Callable[[Callable[..., None]], Any]:
    """`triton.jit` for a kernel."""
    make = triton.jit if triton.knobs.runtime.interpret else Kernel
    return partial(make, do_not_specialize=COUNTS, do_not_specialize_on_alignment=INDICES)
