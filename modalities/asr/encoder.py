"""Whisper's encoder over whole windows: merged projections, norms fused with the sums before them, nothing copied.

Put together from the parts of transformers' encoder, which scales, copies and adds in passes of their own: two fifths
of its time on a card.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention

from polymux.core.compute.fast.layers import MakeLinear, merge
from polymux.modalities.asr.norms import add_norm


@dataclass
class EncoderLayer:
    """One layer, ready to run."""

    before: nn.LayerNorm
    merged: nn.Module
    """Queries, keys and values, side by side."""
    mixed: nn.Module
    before_wide: nn.LayerNorm
    wide: nn.Module
    narrow: nn.Module


class Encoder:
    """Spectrograms in, normalised hidden states out."""

    def __init__(self, encoder: Any, make: MakeLinear) -> None:
        """`encoder` is transformers'; `make` builds the linear layers. What is not merged shares its weights."""
        self._heads = encoder.config.encoder_attention_heads
        self._convolutions = (encoder.conv1, encoder.conv2)
        self._places = encoder.embed_positions.weight.detach()
        self._layers = [read_layer(layer, make) for layer in encoder.layers]
        self._norm = encoder.layer_norm
        self._act = encoder.layers[0].activation_fn if self._layers else nn.GELU()

    def run(self, features: Tensor) -> Tensor:
        """(B, mels, 2 * frames) to (B, frames, width); windows may be shorter than those of the training."""
        for convolve in self._convolutions:
            features = gelu(convolve(features))
        count, width, frames = features.shape
        x = torch.empty(count, frames, width, dtype=features.dtype, device=features.device)
        torch.add(features.transpose(1, 2), self._places[:frames], out=x)
        x = x.flatten(0, 1)
        norms = [*(layer.before for layer in self._layers), self._norm]
        hidden, x = add_norm(x, None, norms[0])
        for layer, following in zip(self._layers, norms[1:]):
            mixed = layer.mixed(self._attend(layer.merged(hidden), count))
            hidden, x = add_norm(mixed, x, layer.before_wide)
            hidden, x = add_norm(bound(layer.narrow(self._act(layer.wide(hidden)))), x, following)
        return hidden.unflatten(0, (count, frames))

    def _attend(self, merged: Tensor, count: int) -> Tensor:
        """(B * frames, 3 * width) to (B * frames, width): every frame of a window to all of it."""
        split = merged.unflatten(0, (count, -1)).unflatten(-1, (3, self._heads, -1))
        query, key, value = (each.transpose(1, 2) for each in split.unbind(dim=2))
        mixed = scaled_dot_product_attention(query, key, value, scale=query.shape[-1] ** -0.5)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def bound(x: Tensor) -> Tensor:
    """Half precision's range ends where some states of large models lie; transformers clamps there, too."""
    if x.dtype != torch.float16:
        return x
    most = torch.finfo(x.dtype).max - 1000
    return x.clamp(-most, most)


def read_layer(layer: Any, make: MakeLinear) -> EncoderLayer:
    attention = layer.self_attn
    return EncoderLayer(
        before=layer.self_attn_layer_norm,
        merged=merge(make, attention.q_proj, attention.k_proj, attention.v_proj),
        mixed=merge(make, attention.out_proj),
        before_wide=layer.final_layer_norm,
        wide=merge(make, layer.fc1),
        narrow=merge(make, layer.fc2),
    )
