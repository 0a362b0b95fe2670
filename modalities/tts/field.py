"""Which inputs a stack of convolutions reads for some of its outputs: how wide the halo of a window must be.

A window of a vocoder's output equals that part of the whole when the window's input reaches as far to both sides as
the stack looks, and what its own edges spoil is cut off. The reach is worked out from kernels, strides, dilations and
paddings, layer by layer from the output back to the input.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Convolution:
    """One layer. `before` is what is put before its input (or, transposed, cut from the start of its output)."""

    kernel: int
    stride: int = 1
    dilation: int = 1
    before: int = 0
    transposed: bool = False

    def reach(self, first: int, last: int) -> tuple[int, int]:
        """The inputs that outputs `first` to `last` depend on."""
        if self.transposed:
            return -((self.kernel - 1 - first - self.before) // self.stride), (last + self.before) // self.stride
        start = first * self.stride - self.before
        return start, last * self.stride - self.before + (self.kernel - 1) * self.dilation


Stack = Sequence["Convolution | Branches"]
"""Layers in the order in which they run."""


@dataclass(frozen=True)
class Branches:
    """Stacks side by side, whose outputs are added. All of them keep the length."""

    stacks: tuple[Stack, ...]

    def reach(self, first: int, last: int) -> tuple[int, int]:
        spans = [find_span(stack, first, last) for stack in self.stacks]
        return min(start for start, _ in spans), max(end for _, end in spans)


def find_span(stack: Stack, first: int, last: int) -> tuple[int, int]:
    """The first and last input that outputs `first` to `last` depend on; negative ones are before the first input."""
    for layer in reversed(stack):
        first, last = layer.reach(first, last)
    return first, last


def find_halo(stack: Stack, hop: int) -> tuple[int, int]:
    """Inputs to the left and to the right of a window that its outputs depend on; an input becomes `hop` outputs."""
    first, last = find_span(stack, 0, hop - 1)
    return max(-first, 0), max(last, 0)


def read_stack(module: nn.Module) -> Iterator[Convolution]:
    """The convolutions of a module that runs its children in the order in which it lists them.

    Where some of them run side by side, the result reaches farther than the module does, which costs time alone.
    """
    inside: set[nn.Module] = set()
    for part in module.modules():
        if part in inside:
            continue
        if hasattr(part, "causal") and isinstance(getattr(part, "conv", None), nn.Conv1d | nn.ConvTranspose1d):
            conv: Any = part.conv
            inside.add(conv)
            yield _read(conv, _padding(part))
        elif isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
            yield _read(part, part.padding[0])


def _read(conv: Any, before: int) -> Convolution:
    return Convolution(
        conv.kernel_size[0], conv.stride[0], conv.dilation[0], before, isinstance(conv, nn.ConvTranspose1d)
    )


def _padding(wrapper: Any) -> int:
    """What a causal or centred wrapper (SEANet's) puts before its input, or cuts from its output."""
    if isinstance(wrapper.conv, nn.Conv1d) and wrapper.causal:
        return int(wrapper.padding_total)
    return int(wrapper.padding_left)
