"""FLUX's blocks in fewer and larger matrix products, and all of the elementwise work between two products in one step.

`Steps` says how that work is done: in plain torch, for a compiler to fuse, or in kernels of our own
(`flux_kernels`), which need no compiler and serve any shape at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, rms_norm

from polymux.core.batch.denoiser import Wrap, keep_layer
from polymux.modalities.diffusion.merged import Merged, attend, modulate, rotate_pairs

EPS = 1e-6
"""Of FLUX's layer norms."""

Stream = tuple[Tensor, Tensor, Tensor]
"""Merged projections of one stream's tokens, (P, T, 3 * dim or more), and the weights of its two head norms."""


class Steps(Protocol):
    """What stands between two matrix products. `shift`, `scale` and `gate` are (P, dim)."""

    split: bool
    """Whether a single block's two halves are projected apart, each into the sum."""

    def run_double(
        self, double: MergedFluxDouble, hidden: Tensor, text: Tensor, parts: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor]:
        """One double block."""
        streams: tuple[Tensor, Tensor] = double(hidden, text, parts, cos, sin)
        return streams

    def settle(self, text: Tensor) -> None:
        """After the last double block: from now on `text` is read."""

    def normalise(self, hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        """Layer norm, scaled and shifted: (P, T, dim)."""

    def add(self, hidden: Tensor, more: Tensor, gate: Tensor) -> Tensor:
        """hidden + gate * more."""

    def add_normalise(
        self, hidden: Tensor, more: Tensor, gate: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The sum, and what `normalise` makes of it."""

    def turn(self, streams: Sequence[Stream], eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value of all streams in turn, normalised by head and turned: (P, T, heads, head dim)."""

    def join(self, joined: Tensor, inner: Tensor) -> Tensor:
        """`joined` and what the activation makes of `inner`, side by side."""

    def activate(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        """The activation of a linear layer's output."""


class TorchSteps(Steps):
    """In plain torch, for the compiler."""

    split = False

    def normalise(self, hidden: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
        return modulate(hidden, shift, scale, EPS)

    def add(self, hidden: Tensor, more: Tensor, gate: Tensor) -> Tensor:
        return hidden + gate[:, None] * more

    def add_normalise(
        self, hidden: Tensor, more: Tensor, gate: Tensor, shift: Tensor, scale: Tensor
    ) -> tuple[Tensor, Tensor]:
        hidden = self.add(hidden, more, gate)
        return hidden, self.normalise(hidden, shift, scale)

    def turn(self, streams: Sequence[Stream], eps: float, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        queries, keys, values = [], [], []
        for projected, query_weight, key_weight in streams:
            size = query_weight.shape
            query, key, value = projected.unflatten(-1, (3, -1, *size)).unbind(2)
            queries.append(rms_norm(query, size, query_weight, eps))
            keys.append(rms_norm(key, size, key_weight, eps))
            values.append(value)
        query, key, value = (torch.cat(each, 1) if len(each) > 1 else each[0] for each in (queries, keys, values))
        return rotate_pairs(query, cos, sin), rotate_pairs(key, cos, sin), value

    def join(self, joined: Tensor, inner: Tensor) -> Tensor:
        return torch.cat([joined, gelu(inner, approximate="tanh")], -1)

    def activate(self, layer: nn.Module, hidden: Tensor) -> Tensor:
        return gelu(layer(hidden), approximate="tanh")


class FluxStream(nn.Module):
    """What a double block does to one of its two streams. `parts`, its modulation, is (P, 6 * dim)."""

    def __init__(self, steps: Steps, wrap: Wrap, states: list[Any], norms: Any, out: Any, feed: Any) -> None:
        """`states` project to query, key and value; `norms` are those of query and key; `feed` is the MLP."""
        super().__init__()
        self.steps = steps
        self.states = wrap(Merged(states), *states)
        self.query, self.key = norms
        self.out, self.up, self.down = (wrap(layer, layer) for layer in (out, feed.net[0].proj, feed.net[2]))

    def project(self, hidden: Tensor, parts: Tensor) -> Stream:
        """Before attention."""
        shift, scale, *_ = parts.chunk(6, -1)
        return self.states(self.steps.normalise(hidden, shift, scale)), self.query.weight, self.key.weight

    def finish(self, hidden: Tensor, seen: Tensor, parts: Tensor) -> Tensor:
        """After attention, which gave `seen`, (P, T, dim)."""
        _, _, gate, shift, scale, last = parts.chunk(6, -1)
        hidden, read = self.steps.add_normalise(hidden, self.out(seen), gate, shift, scale)
        return self.steps.add(hidden, self.down(self.steps.activate(self.up, read)), last)


class MergedFluxDouble(nn.Module):
    """`FluxTransformerBlock`: picture and text each with weights of their own, one attention over both."""

    def __init__(self, block: Any, steps: Steps, wrap: Wrap = keep_layer) -> None:
        super().__init__()
        own = block.attn
        states, norms = [own.to_q, own.to_k, own.to_v], (own.norm_q, own.norm_k)
        self.picture = FluxStream(steps, wrap, states, norms, own.to_out[0], block.ff)
        states, norms = [own.add_q_proj, own.add_k_proj, own.add_v_proj], (own.norm_added_q, own.norm_added_k)
        self.text = FluxStream(steps, wrap, states, norms, own.to_add_out, block.ff_context)

    def forward(self, hidden: Tensor, text: Tensor, parts: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Both streams after the block. `parts` is the modulation, (P, 12 * dim), the picture's first; `cos` and `sin`
        as `rotate_pairs` takes them, text first."""
        own, texts = parts.chunk(2, -1)
        streams = [self.text.project(text, texts), self.picture.project(hidden, own)]
        of_text, of_picture = self.attend(streams, text.shape[1], cos, sin)
        return self.picture.finish(hidden, of_picture, own), self.text.finish(text, of_text, texts)

    def attend(self, streams: list[Stream], texts: int, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """What the text's tokens and the picture's saw, (P, T, dim) each."""
        joined = attend(*self.picture.steps.turn(streams, self.picture.query.eps, cos, sin))
        return joined[:, :texts], joined[:, texts:]


class MergedFluxSingle(nn.Module):
    """`FluxSingleTransformerBlock`: one stream, and one product for query, key, value and what the MLP reads."""

    def __init__(self, block: Any, steps: Steps, wrap: Wrap = keep_layer) -> None:
        super().__init__()
        attention = block.attn
        states = [attention.to_q, attention.to_k, attention.to_v]
        self.steps = steps
        self.dim: int = attention.to_q.out_features
        self.query, self.key = attention.norm_q, attention.norm_k
        layers = states if steps.split else [*states, block.proj_mlp]
        self.states = wrap(Merged(layers), *layers)
        self.up = block.proj_mlp if steps.split else None
        self.out = block.proj_out if steps.split else wrap(block.proj_out, block.proj_out)

    def forward(self, hidden: Tensor, parts: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """`parts` is the modulation, (P, 3 * dim)."""
        steps = self.steps
        shift, scale, gate = parts.chunk(3, -1)
        read = steps.normalise(hidden, shift, scale)
        projected = self.states(read)
        stream = (projected[..., : 3 * self.dim], self.query.weight, self.key.weight)
        joined = attend(*steps.turn([stream], self.query.eps, cos, sin))
        if self.up is None:
            return steps.add(hidden, self.out(steps.join(joined, projected[..., 3 * self.dim :])), gate)
        weight, dim = self.out.weight, self.dim
        more = torch.nn.functional.linear(joined, weight[:, :dim], self.out.bias).flatten(0, 1)
        inner = steps.activate(self.up, read).flatten(0, 1)
        more = torch.addmm(more, inner, weight[:, dim:].T).view_as(hidden)
        return steps.add(hidden, more, gate)
