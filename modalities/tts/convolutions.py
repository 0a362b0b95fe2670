"""A model's convolutions as they run fastest: with plain weights, and over images of one row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized


def bake(module: nn.Module) -> Any:
    """A module like this one, whose weights are no longer put together for each pass from norms and directions."""

    def change(part: nn.Module) -> nn.Module | None:
        plain = not isinstance(part, nn.Conv1d) or not is_parametrized(part, "weight")
        return None if plain else _rebuild(part, nn.Conv1d, 1)

    return _replace(module, change)


def widen(module: nn.Module) -> Any:
    """A module like this one, with its convolutions over images of one row: only those keep channels last, which is how
    a processor and a card compute them."""

    def change(part: nn.Module) -> nn.Module | None:
        if not isinstance(part, nn.Conv1d | nn.ConvTranspose1d):
            return None
        return _rebuild(part, nn.ConvTranspose2d if part.transposed else nn.Conv2d, 2)

    return _replace(module, change)


def _replace(module: nn.Module, change: Callable[[nn.Module], nn.Module | None]) -> nn.Module:
    """The module with what `change` makes of its parts; the given one stays as it is, and shares its weights."""
    copied = copy.copy(module)
    copied._modules = {
        name: (change(part) or _replace(part, change)) if part is not None else None
        for name, part in module._modules.items()
    }
    return copied


def _rebuild(part: Any, kind: Any, dimensions: int) -> nn.Module:
    """The same convolution, anew: taking its parametrization off would take it off every copy of the module, which
    share one class."""
    ones, zeros = (1,) * (dimensions - 1), (0,) * (dimensions - 1)
    with torch.device("meta"):
        built = kind(
            part.in_channels,
            part.out_channels,
            (*ones, *part.kernel_size),
            (*ones, *part.stride),
            (*zeros, *part.padding),
            groups=part.groups,
            bias=part.bias is not None,
            dilation=(*ones, *part.dilation),
        )
    weight = part.weight.detach()
    built.weight = nn.Parameter(weight.reshape(*weight.shape[:2], *ones, weight.shape[2]), requires_grad=False)
    if part.bias is not None:
        built.bias = nn.Parameter(part.bias.detach(), requires_grad=False)
    return built.eval()
