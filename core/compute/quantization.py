"""The number formats that linear layers may be served in, by the name that a model's options use."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from polymux.core.compute.fast.layers import MakeLinear
from polymux.core.compute.int8 import Int8Linear
from polymux.core.errors import ConfigError


class Quantizer(ABC):
    """A number format of linear layers, registered through the `quantizers` hook."""

    name: str
    """What a model's option `quantization` calls it."""

    @abstractmethod
    def refuses(self, device: torch.device) -> str | None:
        """Why it cannot run on this device, or None. Probed, never assumed from a version."""

    @abstractmethod
    def make_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        """A layer that stands for `torch.nn.Linear` with a floating `weight` (out, in) and `bias` (out,) or None.

        It takes (..., in) and returns the same dtype with shape (..., out); no row may depend on another. Its
        attributes `in_features` and `out_features` are those of the weight. Raises `ConfigError` for a weight that
        the format cannot hold.
        """


class Int8(Quantizer):
    """Weights in 8 bits with exact sums, on a CPU."""

    name = "int8"

    def refuses(self, device: torch.device) -> str | None:
        return None if device.type == "cpu" else "it runs on a CPU only"

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return Int8Linear(weight, bias)


BUILT_IN: tuple[Quantizer, ...] = (Int8(),)


def find_quantization(
    name: str | None, device: torch.device, quantizers: Iterable[Quantizer] = ()
) -> MakeLinear | None:
    """What builds the layers that stand for `torch.nn.Linear`, or None for no quantization.

    `quantizers` come before core's own. Raises `ConfigError` for an unknown name, or a device it does not run on.
    """
    if name is None:
        return None
    known = {quantizer.name: quantizer for quantizer in (*BUILT_IN, *quantizers)}
    if name not in known:
        raise ConfigError(f"quantization {name!r} is unknown: use {', '.join(known)}", param="quantization")
    reason = known[name].refuses(device)
    if reason is not None:
        raise ConfigError(f"quantization {name!r} cannot be used on {device.type}: {reason}", param="quantization")
    return known[name].make_linear


def quantize_model(
    model: nn.Module, name: str | None, device: torch.device, quantizers: Iterable[Quantizer] = ()
) -> nn.Module:
    """Replace the linear layers of an untouched model, in place. Raises `ConfigError` as `find_quantization` does."""
    make = find_quantization(name, device, quantizers)
    if make is None:
        return model
    for path, layer in [(path, layer) for path, layer in model.named_modules() if type(layer) is nn.Linear and path]:
        parent, _, attribute = path.rpartition(".")
        setattr(model.get_submodule(parent), attribute, make(layer.weight.detach(), layer.bias))
    return model
