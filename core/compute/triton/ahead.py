"""Compiling kernels side by side before they are launched, in place of one after the other as each is first met.

A kernel takes seconds: Triton's passes, the assembler, and a C compiler for what launches it. None of them needs the
interpreter's lock for long.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton import AsyncCompileMode

from polymux.core.compute.triton.jit import skip_launches

MOST_THREADS = 32


class _Makers(ThreadPoolExecutor):
    def submit(self, make: Callable[[], Any], /, *args: Any, **options: Any) -> Future[Any]:
        return super().submit(_make, make)


def _make(make: Callable[[], Any]) -> Any:
    kernel = make()
    kernel.run  # noqa: B018  # makes its launcher and brings both onto the card, else done at the first launch
    return kernel


class _Mode(AsyncCompileMode):
    def submit(self, key: Any, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]) -> Any:
        kernel = super().submit(key, compile_fn, finalize_fn)
        if kernel.future.done():  # then its next launches need not look for it among those that are being made
            kernel.result(self.ignore_errors)
        return kernel


class _Zeros(TorchDispatchMode):
    """What no kernel has written is zero: as an index, garbage would end up anywhere."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        return made.zero_() if func.overloadpacket.__name__.startswith(("empty", "new_empty")) else made


@contextmanager
def compiling_ahead(device: torch.device) -> Iterator[None]:
    """Kernels that are launched inside are compiled for `device` and not run; all are ready behind it.

    One that cannot be compiled says so when it is launched.
    """
    threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    settle = partial(torch.cuda.set_device, device) if device.index is not None else None
    with (
        _Makers(threads, thread_name_prefix="kernel", initializer=settle) as makers,
        _Mode(makers, ignore_errors=True),
        skip_launches(),
        _Zeros(),
    ):
        yield
