"""Layer norm of a sum, which stands between the parts of every layer here."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import layer_norm


def add_norm(x: Tensor, residual: Tensor | None, norm: nn.LayerNorm) -> tuple[Tensor, Tensor]:
    """The norm of x + residual, (T, width), and the sum; without a residual, of x alone."""
    if x.is_cuda:
        from polymux.core.compute.triton.layer_norm import add_layer_norm

        return add_layer_norm(x, residual, norm.weight, norm.bias, norm.eps)
    total = x if residual is None else residual + x
    return layer_norm(total, norm.normalized_shape, norm.weight, norm.bias, norm.eps), total
