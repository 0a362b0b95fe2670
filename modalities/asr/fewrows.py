"""A decoder's layers for a few tokens on a CUDA device: eight kernels a layer.

With so few rows a kernel takes as long as it takes to start it, whatever it does. So norms, GELU and sums are done by
the products beside them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from polymux.core.compute.triton.layer_norm import add_layer_norm
from polymux.core.compute.triton.linear import FEW, WIDEST, CudaLinear, multiply, norm_multiply

if TYPE_CHECKING:
    from polymux.modalities.asr.decoder import DecoderLayer

__all__ = ["FEW", "fits_few", "run_few"]

Attend = Callable[[int, Tensor], Tensor]
"""(layer, the projection (T, width times 3 or 1)) -> (T, width): self-attention and cross-attention."""


def fits_few(layers: Sequence[DecoderLayer], act: nn.Module) -> bool:
    """Whether layers are of the kind that is computed here: products with plain weights, and GELU's own form."""
    parts = [
        part
        for layer in layers
        for part in (layer.merged, layer.mixed, layer.query, layer.crossed, layer.wide, layer.narrow)
    ]
    if not parts or not all(isinstance(part, CudaLinear) for part in parts):
        return False
    some = torch.linspace(-6, 6, 97, device=layers[0].before.weight.device)
    return layers[0].before.weight.shape[0] <= WIDEST and torch.allclose(act(some), nn.functional.gelu(some), atol=1e-6)


def run_few(x: Tensor, layers: Sequence[DecoderLayer], norm: nn.LayerNorm, own: Attend, slab: Attend) -> Tensor:
    """Embedded tokens (T, width), at most `FEW`, to normalised hidden states."""
    for index, layer in enumerate(layers):
        mixed = own(index, _norm_multiply(x, layer.before, layer.merged))
        x = _multiply(mixed, layer.mixed, x)
        crossed = slab(index, _norm_multiply(x, layer.before_cross, layer.query))
        x = _multiply(crossed, layer.crossed, x)
        x = _multiply(_norm_multiply(x, layer.before_wide, layer.wide, gelu=True), layer.narrow, x)
    return add_layer_norm(x, None, norm.weight, norm.bias, norm.eps)[0]


def _multiply(x: Tensor, layer: nn.Module, residual: Tensor) -> Tensor:
    return multiply(x, layer.weight, layer.bias, residual)  # type: ignore[arg-type]


def _norm_multiply(x: Tensor, norm: nn.LayerNorm, layer: nn.Module, *, gelu: bool = False) -> Tensor:
    return norm_multiply(x, norm, layer.weight, layer.bias, gelu=gelu)  # type: ignore[arg-type]
