"""A linear layer with 4-bit weights: what torchao's kernel asks of its shapes is made true by padding."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad

from polymux.core.compute.quantization import Quantizer
from polymux.core.errors import ConfigError

GROUP = 32
"""Inputs that share a scale; the kernel reads whole groups."""
OUTPUTS = 16
"""The kernel writes outputs by so many."""


class Int4(Quantizer):
    """Weights in 4 bits, in groups of 32, on a CPU."""

    name = "int4"

    def refuses(self, device: torch.device) -> str | None:
        if device.type != "cpu":
            return "its kernels run on a CPU only"
        try:
            self.make_linear(torch.eye(OUTPUTS, GROUP), None)(torch.ones(1, GROUP))
        except Exception as error:
            return f"torchao's kernel does not work here: {error}"
        return None

    def make_linear(self, weight: Tensor, bias: Tensor | None) -> nn.Module:
        return Int4Linear(weight, bias)


class Int4Linear(nn.Module):
    """`x @ weight.T + bias` with rows that never depend on each other. Takes and returns any floating dtype."""

    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        if weight.dim() != 2 or not weight.is_floating_point() or 0 in weight.shape:
            raise ConfigError(f"a weight must be floating and (out, in), not {weight.dtype} {tuple(weight.shape)}")
        if not torch.isfinite(weight).all():
            raise ConfigError("a weight holds infinite or NaN values and cannot be quantized to int4")
        self.out_features, self.in_features = weight.shape
        self._spare = -self.in_features % GROUP
        padded = pad(weight.detach().float(), (0, self._spare, 0, -self.out_features % OUTPUTS)).contiguous()
        self.weight = nn.Parameter(_pack(padded), requires_grad=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.float()
        if self._spare:
            rows = pad(rows, (0, self._spare))
        out = linear(rows.contiguous(), self.weight)[..., : self.out_features]
        return (out if self.bias is None else out + self.bias).to(x.dtype)


def _pack(weight: Tensor) -> Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torchao's own, about things that are not used here
        from torchao.prototype.quantization.int4 import Int4OpaqueTensor

        packed: Tensor = Int4OpaqueTensor.from_hp(weight, [1, GROUP])
    return packed
