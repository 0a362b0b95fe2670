"""Whisper's decoder over packed rows: merged projections, self-attention over blocks, cross-attention over slabs.

Put together from the parts of transformers' decoder. On a CUDA device a step looks at nothing on the host, so it is
recorded; norms are fused with the sums before them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from transformers import WhisperForConditionalGeneration

from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.attention import AttentionOptions, PagedContext
from polymux.core.compute.fast.layers import MakeLinear, merge
from polymux.core.compute.fast.operations import choose_operations
from polymux.modalities.asr.norms import add_norm


@dataclass
class DecoderLayer:
    """One layer, ready to run."""

    before: nn.LayerNorm
    merged: nn.Module
    """Queries, keys and values of self-attention, side by side."""
    mixed: nn.Module
    before_cross: nn.LayerNorm
    query: nn.Module
    crossed: nn.Module
    before_wide: nn.LayerNorm
    wide: nn.Module
    narrow: nn.Module


class WhisperDecoder(TokenModel):
    """Every row reads the slab of its window."""

    recordable = True

    def __init__(
        self, model: WhisperForConditionalGeneration, slab: CacheSpec, make: MakeLinear | None = None, above: int = 0
    ) -> None:
        """`make` builds the linear layers: a quantized kind. The slab's first `above` layers are another decoder's."""
        config = model.config
        decoder = model.model.decoder
        parameter = model.proj_out.weight
        make = make or choose_operations(parameter.device, parameter.dtype).linear
        self.slab = slab
        self._above = above
        self.heads = config.decoder_attention_heads
        dim = config.d_model // self.heads
        self.shape = TokenShape(
            layers=config.decoder_layers,
            kv_heads=self.heads,
            head_dim=dim,
            vocabulary=config.vocab_size,
            context=config.max_target_positions,
            dtype=parameter.dtype,
        )
        self.embedding = decoder.embed_tokens.weight.detach()
        self.places = decoder.embed_positions.weight.detach()
        self.layers = [read_layer(layer, make) for layer in decoder.layers]
        self.norm = decoder.layer_norm
        self.head = make(parameter.detach(), None)
        self.act = decoder.layers[0].activation_fn if self.layers else nn.GELU()
        self._self_options = AttentionOptions(scale=dim**-0.5)
        self._cross_options = AttentionOptions(scale=dim**-0.5, causal=False)
        self._still: Tensor | None = None
        """A rotation by nothing: the fused kernel that writes the cache also rotates."""
        self._few = 0
        """Tokens up to which layers are computed by `fewrows`."""
        if parameter.is_cuda:
            self.start_still(parameter.device)

    def start_still(self, device: torch.device) -> None:
        """From now on kernels of our own do what lies between products, and write the cache."""
        from polymux.modalities.asr.fewrows import FEW, fits_few

        self._still = torch.zeros(2, 1, self.shape.head_dim, dtype=self.shape.dtype, device=device)
        self._still[0] = 1.0
        self._few = FEW if fits_few(self.layers, self.act) else 0

    def forward(self, batch: TokenBatch) -> Tensor:
        return self.head(self.run(batch)[batch.sampled])

    def run(self, batch: TokenBatch) -> Tensor:
        """Normalised hidden states of all tokens: (T, width)."""
        context = batch.context
        x = self.embedding[batch.ids] + self.places[batch.positions]
        if x.shape[0] <= self._few:
            return self._run_few(x, context)
        hidden, x = add_norm(x, None, self.layers[0].before if self.layers else self.norm)
        for index, layer in enumerate(self.layers):
            mixed = layer.mixed(self._attend(index, layer.merged(hidden), context))
            hidden, x = add_norm(mixed, x, layer.before_cross)
            crossed = layer.crossed(self._cross(index, layer.query(hidden), context))
            hidden, x = add_norm(crossed, x, layer.before_wide)
            following = self.layers[index + 1].before if index + 1 < len(self.layers) else self.norm
            hidden, x = add_norm(layer.narrow(self.act(layer.wide(hidden))), x, following)
        return hidden

    def _run_few(self, x: Tensor, context: PagedContext) -> Tensor:
        from polymux.modalities.asr.fewrows import run_few

        own, slab = partial(self._attend, context=context), partial(self._cross, context=context)
        return run_few(x, self.layers, self.norm, own, slab)

    def _cross(self, index: int, query: Tensor, context: PagedContext) -> Tensor:
        """Queries (T, width) to what each row's encoder left: (T, width)."""
        query = query.unflatten(-1, (self.heads, -1))
        return context.attend_slab(self._above + index, query, self._cross_options).flatten(1)

    def _attend(self, index: int, merged: Tensor, context: PagedContext) -> Tensor:
        """Queries, keys and values (T, 3 width), side by side: (T, width)."""
        merged = merged.unflatten(-1, (3 * self.heads, -1))
        if self._still is not None and context.backend.recordable:
            from polymux.core.compute.triton.rotary import rotate_write
            from polymux.core.compute.triton.single import attend_own

            cache = context.cache[:, index]
            if context.batch.decoding:
                return attend_own(merged, self.heads, cache, context.batch, self._self_options.scale).flatten(1)
            memo = context.batch.memo
            if "still" not in memo:
                memo["still"] = torch.zeros_like(context.batch.positions)
            turning = (self._still, memo["still"])
            query = rotate_write(merged, self.heads, self.heads, turning, None, cache, context.batch)
            return context.backend.paged(query, cache, context.batch, self._self_options).flatten(1)
        query, key, value = merged.split(self.heads, dim=1)
        return context.attend(index, query, key, value, self._self_options).flatten(1)


def read_layer(layer: nn.Module, make: MakeLinear) -> DecoderLayer:
    attention, cross = layer.self_attn, layer.encoder_attn
    return DecoderLayer(
        before=layer.self_attn_layer_norm,
        merged=merge(make, attention.q_proj, attention.k_proj, attention.v_proj),
        mixed=merge(make, attention.out_proj),
        before_cross=layer.encoder_attn_layer_norm,
        query=merge(make, cross.q_proj),
        crossed=merge(make, cross.out_proj),
        before_wide=layer.final_layer_norm,
        wide=merge(make, layer.fc1),
        narrow=merge(make, layer.fc2),
    )
