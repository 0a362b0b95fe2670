"""Whisper's encoder on the runtime, and both halves of a model from its folder.

The encoder's pass takes samples, and leaves every decoder layer's cross-attention keys and values in the window's
slab, where the decoder's rows read them.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import WhisperForConditionalGeneration

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.fast.layers import MakeLinear, merge
from polymux.core.compute.fast.operations import choose_operations
from polymux.core.compute.quantization import find_quantization, quantize_model
from polymux.core.errors import ModelError
from polymux.modalities.asr.decoder import WhisperDecoder
from polymux.modalities.asr.features import HOP, LogMel

STRIDE = 2
"""Frames of the spectrogram for one position of the encoder."""


class WhisperEncoder(OneShotModel):
    """Windows of samples in; each one's cross-attention keys and values out, into its slab."""

    slab: CacheSpec

    def __init__(self, model: WhisperForConditionalGeneration, make: MakeLinear | None = None) -> None:
        config = model.config
        self.encoder = model.model.encoder.eval().requires_grad_(False)
        parameter = next(self.encoder.parameters())
        self.samples = config.max_source_positions * STRIDE * HOP
        """Of one window; shorter ones are filled up with silence, as in training."""
        self.features = LogMel(config.num_mel_bins).to(parameter.device)
        make = make or choose_operations(parameter.device, parameter.dtype).linear
        crosses = [layer.encoder_attn for layer in model.model.decoder.layers]
        self._projections = [merge(make, cross.k_proj, cross.v_proj) for cross in crosses]
        self._heads = config.decoder_attention_heads
        self._device, self._dtype = parameter.device, parameter.dtype
        dim = config.d_model // self._heads
        shape = (len(crosses), 2, config.max_source_positions, self._heads, dim)
        self.slab = CacheSpec("cross", shape, self._dtype, config.max_source_positions)

    def forward(self, items: list[np.ndarray], slabs: list[Tensor]) -> list[None]:
        """`items` are float32 arrays of at most `samples` samples at 16 kHz."""
        batch = torch.zeros(len(items), self.samples, pin_memory=self._device.type == "cuda")
        for row, item in zip(batch, items):
            row[: len(item)] = torch.from_numpy(item)
        features = self.features(batch.to(self._device, non_blocking=True)).to(self._dtype)
        hidden = self.encoder(features).last_hidden_state
        for layer, project in enumerate(self._projections):
            # (B, frames, 2, heads, dim), as the slabs have it: (2, frames, heads, dim)
            both = project(hidden).unflatten(-1, (2, self._heads, -1)).transpose(1, 2)
            torch._foreach_copy_([slab[layer] for slab in slabs], list(both.unbind(0)))
        return [None] * len(items)


def load_whisper(
    folder: Path, device: torch.device, dtype: torch.dtype, quantization: str | None = None
) -> tuple[WhisperEncoder, WhisperDecoder]:
    """Both halves of the model in `folder`. `quantization` "int8": weights in 8 bits, on a CPU.

    Raises `ModelError`, and `ConfigError` for a quantization that is unknown or does not run here.
    """
    make = find_quantization(quantization, device)
    try:
        model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a Whisper model from {folder}: {error}") from error
    encoder, decoder = split_whisper(model.eval().to(device), make)  # type: ignore[arg-type]
    quantize_model(encoder.encoder, quantization, device)
    return encoder, decoder


def split_whisper(
    model: WhisperForConditionalGeneration, make: MakeLinear | None = None
) -> tuple[WhisperEncoder, WhisperDecoder]:
    """The encoder and the decoder of one model; it belongs to them from now on."""
    encoder = WhisperEncoder(model, make)
    return encoder, WhisperDecoder(model, encoder.slab, make)
