"""Linear layers with int8 weights for CPUs, in which a row's result never depends on its neighbours.

    Int8Linear         a linear layer whose weights are int8 with one scale per output
    merge_linears      several layers that read the same input -> one layer

Weights are rounded to the nearest of 255 levels per output channel (Jacob et al. 2018, section 2.1, symmetric and per
channel as in Krishnamoorthi 2018, section 3.1.1). Two ways lead to the product:

    the compiled kernel   activations become int16 with one scale per row, sums are exact integers. Exact sums do not
                          depend on their order, so a row is bitwise the same alone, in a batch or in a prompt.
    torch's operator      `torch._weight_int8pack_mm` in bfloat16, where no compiler or no AVX2 is at hand. Rows are
                          bitwise independent too; about half as fast for a row and a third for sixteen.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from polymux.core.compute.int8_kernel import find_limit, load_int8_kernel
from polymux.core.errors import ConfigError

LEVELS = 127

OPERATOR_ROWS = 64
"""Rows per call of torch's operator: beyond it the time per row grows."""

OPERATOR_STEP = 32
"""Inputs are padded to a multiple of it: torch's operator reads past the end of rows of another length."""


def quantize_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Floating (out, in) -> codes, int8 (out, in), and scales, float32 (out,): weight ~ codes * scales[:, None]."""
    if not torch.isfinite(weight).all():
        raise ConfigError("a weight holds infinite or NaN values and cannot be quantized to int8")
    weight = weight.detach().float()
    scales = weight.abs().amax(dim=1) / LEVELS
    codes = (weight / scales.clamp(min=torch.finfo(torch.float32).tiny)[:, None]).round()
    return codes.clamp(-LEVELS, LEVELS).to(torch.int8), scales


class Int8Linear(nn.Module):
    """`x @ weight.T + bias` for inference on a CPU, built from a floating `weight` (out, in) and `bias` (out,).

    Takes float32, bfloat16 or float16 of shape (..., in) and returns the same dtype with shape (..., out). float32 is
    the kernel's own: other dtypes cost a conversion each way. `native=False` keeps the compiled kernel out.
    """

    codes: Tensor
    scales: Tensor
    bias: Tensor | None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, native: bool = True) -> None:
        super().__init__()
        if weight.dim() != 2 or not weight.is_floating_point():
            raise ConfigError(f"a weight must be floating and (out, in), not {weight.dtype} {tuple(weight.shape)}")
        if 0 in weight.shape:
            raise ConfigError(f"a weight must not be empty; its shape is {tuple(weight.shape)}")
        if weight.device.type != "cpu":
            raise ConfigError(f"Int8Linear runs on the CPU; the weight is on {weight.device}")
        if bias is not None and bias.shape != weight.shape[:1]:
            raise ConfigError(f"a bias of shape {tuple(bias.shape)} does not fit a weight {tuple(weight.shape)}")
        self.out_features, self.in_features = weight.shape
        codes, scales = quantize_weight(weight)
        self._kernel = load_int8_kernel() if native else None
        self._limit = find_limit(codes)
        # A layout made for one machine is no part of a checkpoint.
        layout = _pad_inputs(codes) if self._kernel is None else self._kernel.pack(codes)
        self.register_buffer("codes", layout, persistent=False)
        self.register_buffer("scales", scales, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach().float().contiguous(), persistent=False)

    @property
    def native(self) -> bool:
        """Whether the compiled kernel does the work."""
        return self._kernel is not None

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] != self.in_features:
            raise ValueError(f"the input's last dimension is {x.shape[-1]}; this layer reads {self.in_features}")
        rows = x.reshape(-1, self.in_features)
        if self._kernel is None:
            out = self._multiply(rows)
        else:
            out = self._kernel.multiply(rows.float().contiguous(), self.codes, self.scales, self.bias, self._limit)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _multiply(self, rows: Tensor) -> Tensor:
        """(rows, in) -> float32 (rows, out) with torch's operator."""
        scales = self.scales.bfloat16()
        parts = _pad_inputs(rows.bfloat16()).split(OPERATOR_ROWS)
        out = torch.cat([torch._weight_int8pack_mm(part, self.codes, scales) for part in parts]).float()
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        shape = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}, native={self.native}"


def merge_linears(linears: Sequence[nn.Linear], *, native: bool = True) -> Int8Linear:
    """One layer whose output is the outputs of `linears`, which read the same input, side by side."""
    if len({linear.in_features for linear in linears}) != 1:
        raise ConfigError(f"merged layers must read the same input, not {[linear.in_features for linear in linears]}")
    weight = torch.cat([linear.weight.detach() for linear in linears])
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([_bias_or_zeros(linear) for linear in linears])
    return Int8Linear(weight, bias, native=native)


def _pad_inputs(matrix: Tensor) -> Tensor:
    """(n, in) -> (n, in rounded up), contiguous."""
    return pad(matrix, (0, -matrix.shape[1] % OPERATOR_STEP)).contiguous()


def _bias_or_zeros(linear: nn.Linear) -> Tensor:
    return torch.zeros(linear.out_features) if linear.bias is None else linear.bias.detach()
