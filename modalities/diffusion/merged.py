"""Blocks of transformers with their projections merged, so that a step is fewer and larger matrix products.

Each block is made of diffusers' own, whose weights it takes over (the projections are copied once, side by side). All
elementwise work stands between two products, where a compiler fuses it. `compile_blocks` compiles one block of a kind
for all of its kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention

from polymux.core.batch.denoiser import Wrap, keep_layer

VARIANTS = 64
"""Shapes of one kind of block that are compiled before the compiler would give up on it."""


class Merged(nn.Module):
    """Linear layers that read the same input, as one."""

    def __init__(self, layers: Iterable[Any]) -> None:
        super().__init__()
        layers = list(layers)
        weight = torch.cat([layer.weight.data for layer in layers])
        biases = [layer.bias for layer in layers]
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None
        if all(bias is not None for bias in biases):
            self.bias = nn.Parameter(torch.cat([bias.data for bias in biases]), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return linear(hidden, self.weight, self.bias)


def rotate_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn neighbouring numbers of (P, T, heads, dim) by an angle: `cos` and `sin` are (T, 1, dim / 2) float32."""
    first, second = states.float().unflatten(-1, (-1, 2)).unbind(-1)
    turned = torch.stack([first * cos - second * sin, first * sin + second * cos], -1)
    return turned.flatten(-2).to(states.dtype)


def halve_rotary(cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Tables (T, dim) in which every value stands twice, as (T, 1, dim / 2) float32."""
    return cos[:, None, 0::2].float().contiguous(), sin[:, None, 1::2].float().contiguous()


def attend(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """(P, T, heads, dim) each to (P, T, heads * dim)."""
    joined = scaled_dot_product_attention(query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
    return joined.transpose(1, 2).flatten(2)


def modulate(hidden: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Normalised without weights, then scaled and shifted, (P, dim) each."""
    return layer_norm(hidden, hidden.shape[-1:], eps=eps) * (1 + scale[:, None]) + shift[:, None]


class MergedWan(nn.Module):
    """`WanTransformerBlock` of a text-to-video model: attention over the clip, then over the text, then an MLP."""

    def __init__(self, block: Any, wrap: Wrap = keep_layer) -> None:
        super().__init__()
        inner, cross = block.attn1, block.attn2
        states, text_states = [inner.to_q, inner.to_k, inner.to_v], [cross.to_k, cross.to_v]
        self.heads: int = inner.heads
        self.states, self.text_states = wrap(Merged(states), *states), wrap(Merged(text_states), *text_states)
        layers = (inner.to_out[0], cross.to_q, cross.to_out[0], block.ffn.net[0].proj, block.ffn.net[2])
        self.out, self.text_query, self.text_out, self.up, self.down = (wrap(layer, layer) for layer in layers)
        self.query, self.key = inner.norm_q, inner.norm_k
        self.text_query_norm, self.text_key_norm = cross.norm_q, cross.norm_k
        self.text_norm = block.norm2
        self.table = block.scale_shift_table
        self.eps: float = block.norm1.eps

    def forward(self, hidden: Tensor, text: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`modulation` is (P, 6, dim); `text` (P, text tokens, dim)."""
        shift, scale, gate, low, high, last = (self.table + modulation.float()).unbind(1)
        query, key, value = self.states(self._normalise(hidden, shift, scale)).chunk(3, -1)
        joined = attend(
            rotate_pairs(self._split(self._norm(query, self.query)), cos, sin),
            rotate_pairs(self._split(self._norm(key, self.key)), cos, sin),
            self._split(value),
        )
        hidden = (hidden.float() + self.out(joined) * gate[:, None]).to(hidden.dtype)
        read = self.text_norm(hidden.float()).to(hidden.dtype)
        key, value = self.text_states(text).chunk(2, -1)
        seen = attend(
            self._split(self._norm(self.text_query(read), self.text_query_norm)),
            self._split(self._norm(key, self.text_key_norm)),
            self._split(value),
        )
        hidden = hidden + self.text_out(seen)
        inner = self.down(gelu(self.up(self._normalise(hidden, low, high)), approximate="tanh"))
        return (hidden.float() + inner.float() * last[:, None]).to(hidden.dtype)

    def _normalise(self, hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return modulate(hidden.float(), shift, scale, self.eps).to(hidden.dtype)

    def _norm(self, states: Tensor, norm: Any) -> Tensor:
        return rms_norm(states, states.shape[-1:], norm.weight, norm.eps)

    def _split(self, states: Tensor) -> Tensor:
        return states.unflatten(-1, (self.heads, -1))


def compile_blocks(blocks: Iterable[nn.Module], *, dynamic: bool | None = None) -> None:
    """Let torch compile blocks, each kind once for every shape it meets; with `dynamic` unset, for any shape from the
    second one on. The first passes are slow."""
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, VARIANTS)
    for block in blocks:
        block.compile(fullgraph=True, dynamic=dynamic)
