"""Our Triton kernels on a card that is not there: what they would be compiled to is known, and nothing is run.

    with pretend_card() as card:
        ...                      launches on CPU tensors are noted; their outputs hold whatever was in memory
    card.variants                kernels as they would have been compiled, each a name and its specialisation

While `card.compile` is set they are really compiled, for a Hopper: what Triton or the assembler refuses is found here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

HOPPER = GPUTarget("cuda", 90, 32)


class _Driver:
    def get_current_target(self) -> GPUTarget:
        return HOPPER

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


@dataclass
class Card:
    """What was launched."""

    compile: bool = False
    variants: set[tuple[str, str]] = field(default_factory=set)
    compiled: dict[tuple[str, str], Any] = field(default_factory=dict)


@contextmanager
def pretend_card() -> Iterator[Card]:
    """Launches inside are noted, not run."""
    card = Card()
    run = JITFunction.run

    def note(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        *_, binder = kernel.device_caches[0]
        _, specialization, settings = binder(*args, **options, debug=False)
        variant = (kernel.fn.__qualname__, f"{kernel.fn.__module__} {specialization} {sorted(settings.items())}")
        card.variants.add(variant)
        if card.compile and variant not in card.compiled:
            card.compiled[variant] = run(kernel, *args, grid=grid, warmup=True, **options)

    active = driver._active
    driver.set_active(_Driver())
    try:
        with mock.patch.object(JITFunction, "run", note):
            yield card
    finally:
        driver._active = active
