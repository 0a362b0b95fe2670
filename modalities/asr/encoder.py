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

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows
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
        dim = encoder.config.d_model // self._heads
        self._options = AttentionOptions(dim**-0.5, causal=False)
        self._backend = open_backend(self._places, dim)

    def run(self, features: Tensor) -> Tensor:
        """(B, mels, 2 * frames) to (B, frames, width); windows may be shorter than those of the training."""
        for convolve in self._convolutions:
            features = gelu(convolve(features))
        count, width, frames = features.shape
        x = torch.empty(count, frames, width, dtype=features.dtype, device=features.device)
        torch.add(features.transpose(1, 2), self._places[:frames], out=x)
        x = x.flatten(0, 1)
        windows = torch.arange(0, (count + 1) * frames, frames, dtype=torch.int32, device=x.device)
        rows = PackedRows(list(range(0, (count + 1) * frames, frames)), windows)
        norms = [*(layer.before for layer in self._layers), self._norm]
        hidden, x = add_norm(x, None, norms[0])
        for layer, following in zip(self._layers, norms[1:]):
            mixed = layer.mixed(self._attend(layer.merged(hidden), rows))
            hidden, x = add_norm(mixed, x, layer.before_wide)
            hidden, x = add_norm(bound(layer.narrow(self._act(layer.wide(hidden)))), x, following)
        return hidden.unflatten(0, (count, frames))

    def _attend(self, merged: Tensor, rows: PackedRows) -> Tensor:
        """(B * frames, 3 * width) to (B * frames, width): every frame of a window to all of it."""
        if self._backend is not None:
            query, key, value = merged.unflatten(-1, (3, self._heads, -1)).unbind(dim=1)
            return self._backend.packed(query, key, value, rows, self._options).flatten(1)
        count = len(rows.starts) - 1
        split = merged.unflatten(0, (count, -1)).unflatten(-1, (3, self._heads, -1))
        query, key, value = (each.transpose(1, 2) for each in split.unbind(dim=2))
        mixed = scaled_dot_product_attention(query, key, value, scale=self._options.scale)
        return mixed.transpose(1, 2).flatten(2).flatten(0, 1)


def open_backend(weights: Tensor, dim: int) -> AttentionBackend | None:
    """Our own kernel on a card, as fast as cuDNN's there, which would plan each new number and length of windows on the
    host; elsewhere torch's choice."""
    if not weights.is_cuda:
        return None
    from polymux.core.compute.triton.attention import TritonAttention

    backend = TritonAttention()
    return backend if backend.refuses(weights.device, weights.dtype, dim) is None else None


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
