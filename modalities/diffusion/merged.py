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
from torch.nn.functional import gelu, layer_norm, linear, rms_norm, scaled_dot_product_attention, silu

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


class MergedSelf(nn.Module):
    """Query, key and value of one stream of FLUX, normalised by head."""

    def __init__(self, projections: list[Any], norms: list[Any], more: list[Any] | None = None) -> None:
        super().__init__()
        self.projections = Merged([*projections, *(more or [])])
        self.query, self.key = norms
        self.dim: int = projections[0].out_features

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(P, T, heads, head dim) thrice, and what the further layers gave."""
        size = self.query.weight.shape[0]
        projected = self.projections(hidden)
        states, rest = projected[..., : 3 * self.dim], projected[..., 3 * self.dim :]
        query, key, value = states.unflatten(-1, (3, -1, size)).unbind(2)
        query = rms_norm(query, (size,), self.query.weight, self.query.eps)
        key = rms_norm(key, (size,), self.key.weight, self.key.eps)
        return query, key, value, rest


class MergedFluxDouble(nn.Module):
    """`FluxTransformerBlock`: picture and text each with weights of their own, one attention over both."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention = block.attn
        self.picture = MergedSelf(
            [attention.to_q, attention.to_k, attention.to_v], [attention.norm_q, attention.norm_k]
        )
        self.text = MergedSelf(
            [attention.add_q_proj, attention.add_k_proj, attention.add_v_proj],
            [attention.norm_added_q, attention.norm_added_k],
        )
        self.modulation = Merged([block.norm1.linear, block.norm1_context.linear])
        self.out, self.text_out = attention.to_out[0], attention.to_add_out
        self.up, self.down = block.ff.net[0].proj, block.ff.net[2]
        self.text_up, self.text_down = block.ff_context.net[0].proj, block.ff_context.net[2]

    def forward(
        self, hidden: Tensor, text: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Both streams after the block. `cos` and `sin` as `rotate_pairs` takes them, text first."""
        parts = self.modulation(silu(modulation)).chunk(12, -1)
        query, key, value, _ = self.picture(modulate(hidden, parts[0], parts[1], 1e-6))
        text_query, text_key, text_value, _ = self.text(modulate(text, parts[6], parts[7], 1e-6))
        joined = attend(
            rotate_pairs(torch.cat([text_query, query], 1), cos, sin),
            rotate_pairs(torch.cat([text_key, key], 1), cos, sin),
            torch.cat([text_value, value], 1),
        )
        of_text, of_picture = joined.split([text.shape[1], hidden.shape[1]], 1)
        hidden = hidden + parts[2][:, None] * self.out(of_picture)
        text = text + parts[8][:, None] * self.text_out(of_text)
        inner = self.down(gelu(self.up(modulate(hidden, parts[3], parts[4], 1e-6)), approximate="tanh"))
        inner_text = self.text_down(gelu(self.text_up(modulate(text, parts[9], parts[10], 1e-6)), approximate="tanh"))
        return hidden + parts[5][:, None] * inner, text + parts[11][:, None] * inner_text


class MergedFluxSingle(nn.Module):
    """`FluxSingleTransformerBlock`: one stream, and one product for query, key, value and what the MLP reads."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        attention = block.attn
        self.states = MergedSelf(
            [attention.to_q, attention.to_k, attention.to_v],
            [attention.norm_q, attention.norm_k],
            [block.proj_mlp],
        )
        self.modulation = block.norm.linear
        self.out = block.proj_out

    def forward(self, hidden: Tensor, modulation: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        shift, scale, gate = self.modulation(silu(modulation)).chunk(3, -1)
        query, key, value, inner = self.states(modulate(hidden, shift, scale, 1e-6))
        joined = attend(rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin), value)
        return hidden + gate[:, None] * self.out(torch.cat([joined, gelu(inner, approximate="tanh")], -1))


class MergedWan(nn.Module):
    """`WanTransformerBlock` of a text-to-video model: attention over the clip, then over the text, then an MLP."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        inner, cross = block.attn1, block.attn2
        self.heads: int = inner.heads
        self.states = Merged([inner.to_q, inner.to_k, inner.to_v])
        self.query, self.key, self.out = inner.norm_q, inner.norm_k, inner.to_out[0]
        self.text_query, self.text_states = cross.to_q, Merged([cross.to_k, cross.to_v])
        self.text_query_norm, self.text_key_norm, self.text_out = cross.norm_q, cross.norm_k, cross.to_out[0]
        self.text_norm = block.norm2
        self.up, self.down = block.ffn.net[0].proj, block.ffn.net[2]
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
