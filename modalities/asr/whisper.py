"""Whisper on the runtime: transformers' modules, with the frames projected once per window and read from slabs.

The encoder's pass takes samples, and leaves every decoder layer's cross-attention keys and values in the window's
slab. The decoder's cross-attention reads them there; its self-attention is paged like any other decoder's.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenShape
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.attention import AttentionOptions, PagedContext
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.core.errors import InternalError, ModelError
from polymux.modalities.asr.features import HOP, LogMel

STRIDE = 2
"""Frames of the spectrogram for one position of the encoder."""


class WhisperEncoder(OneShotModel):
    """Windows of samples in; each one's cross-attention keys and values out, into its slab."""

    slab: CacheSpec

    def __init__(self, model: WhisperForConditionalGeneration) -> None:
        config = model.config
        self.encoder = model.model.encoder.eval().requires_grad_(False)
        parameter = next(self.encoder.parameters())
        self.samples = config.max_source_positions * STRIDE * HOP
        """Of one window; shorter ones are filled up with silence, as in training."""
        self.features = LogMel(config.num_mel_bins).to(parameter.device)
        crosses = [layer.encoder_attn for layer in model.model.decoder.layers]
        self._projections = [(cross.k_proj, cross.v_proj) for cross in crosses]
        self._heads = config.decoder_attention_heads
        self._device, self._dtype = parameter.device, parameter.dtype
        dim = config.d_model // self._heads
        shape = (len(crosses), 2, config.max_source_positions, self._heads, dim)
        self.slab = CacheSpec("cross", shape, self._dtype, config.max_source_positions)

    def forward(self, items: list[np.ndarray], slabs: list[Tensor]) -> list[None]:
        """`items` are float32 arrays of at most `samples` samples at 16 kHz."""
        batch = torch.zeros(len(items), self.samples)
        for row, item in zip(batch, items):
            row[: len(item)] = torch.from_numpy(item)
        features = self.features(batch.to(self._device)).to(self._dtype)
        hidden = self.encoder(features).last_hidden_state
        for layer, (project_key, project_value) in enumerate(self._projections):
            keys = project_key(hidden).unflatten(-1, (self._heads, -1))
            values = project_value(hidden).unflatten(-1, (self._heads, -1))
            for slab, key, value in zip(slabs, keys, values):
                slab[layer, 0], slab[layer, 1] = key, value
        return [None] * len(items)


class WhisperDecoder(TokenModel):
    """The decoder over packed rows; every row reads the slab of its window."""

    def __init__(self, model: WhisperForConditionalGeneration, slab: CacheSpec) -> None:
        config = copy.deepcopy(model.config)
        decoder = model.model.decoder
        for module in decoder.modules():  # the encoder keeps its own attention
            if "config" in vars(module):
                module.config = config
        self.decoder = prepare_reference(decoder)
        for index, layer in enumerate(decoder.layers):
            layer.encoder_attn = SlabAttention(layer.encoder_attn, index)
        self.head = model.proj_out
        self.slab = slab
        self.shape = TokenShape(
            layers=config.decoder_layers,
            kv_heads=config.decoder_attention_heads,
            head_dim=config.d_model // config.decoder_attention_heads,
            vocabulary=config.vocab_size,
            context=config.max_target_positions,
            dtype=self.head.weight.dtype,
        )

    def forward(self, batch: TokenBatch) -> Tensor:
        hidden = self.decoder(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            # its layers skip cross-attention unless they are given something to attend to; ours is in the context
            encoder_hidden_states=batch.positions[None],
            use_cache=False,
            **{KEYWORD: batch.context},
        ).last_hidden_state
        return self.head(hidden[0, batch.sampled])


class SlabAttention(torch.nn.Module):
    """Cross-attention of one decoder layer. Keys and values are in the slab: only queries are projected."""

    def __init__(self, original: Any, layer: int) -> None:
        super().__init__()
        self.q_proj = original.q_proj
        self.out_proj = original.out_proj
        self.heads: int = original.num_heads
        self.layer = layer
        self.scaling: float = original.scaling

    def forward(self, hidden_states: Tensor, **keywords: Any) -> tuple[Tensor, None]:
        """(1, T, width) to (1, T, width)."""
        context = keywords.get(KEYWORD)
        if not isinstance(context, PagedContext):
            raise InternalError(f"cross-attention was reached without its context: pass {KEYWORD}= to the decoder")
        # Whisper scales its queries before the product; in half precision the order is not the same
        query = (self.q_proj(hidden_states[0]) * self.scaling).unflatten(-1, (self.heads, -1))
        mixed = context.attend_slab(self.layer, query, AttentionOptions(scale=1.0, causal=False))
        return self.out_proj(mixed.flatten(1))[None], None


def load_whisper(folder: Path, device: torch.device, dtype: torch.dtype) -> tuple[WhisperEncoder, WhisperDecoder]:
    """Both halves of the model in `folder`. Raises `ModelError`."""
    try:
        model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a Whisper model from {folder}: {error}") from error
    return split_whisper(model.to(device))  # type: ignore[arg-type]


def split_whisper(model: WhisperForConditionalGeneration) -> tuple[WhisperEncoder, WhisperDecoder]:
    """The encoder and the decoder of one model; it belongs to them from now on."""
    encoder = WhisperEncoder(model)
    return encoder, WhisperDecoder(model, encoder.slab)
