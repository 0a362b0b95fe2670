"""The number formats that linear layers may be served in, by the name that a model's options use."""

from __future__ import annotations

import torch

from polymux.core.compute.int8 import Int8Linear, quantize_linears
from polymux.core.errors import ConfigError

QUANTIZATIONS = {"int8": Int8Linear}
"""int8: weights in 8 bits with exact sums, on a CPU."""


def find_quantization(name: str | None, device: torch.device) -> type[Int8Linear] | None:
    """The layer that stands for `torch.nn.Linear`, or None for no quantization.

    Raises `ConfigError` for an unknown name, or a device it does not run on.
    """
    if name is None:
        return None
    if name not in QUANTIZATIONS:
        raise ConfigError(f"quantization {name!r} is unknown: use {', '.join(QUANTIZATIONS)}", param="quantization")
    if device.type != "cpu":
        raise ConfigError(f"quantization {name!r} runs on a CPU only", param="quantization")
    return QUANTIZATIONS[name]


def quantize_model(model: torch.nn.Module, name: str | None, device: torch.device) -> torch.nn.Module:
    """Replace the linear layers of an untouched model, in place. Raises `ConfigError` as `find_quantization` does."""
    if find_quantization(name, device) is not None:
        quantize_linears(model)
    return model
