"""Whisper's encoder on the runtime, and both halves of a model from its folder.

The encoder's pass takes samples, and leaves every decoder layer's cross-attention keys and values in the window's
slab, where the decoder's rows read them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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


@dataclass(frozen=True)
class Excerpt:
    """Samples to hear in a window of `frames` positions, which is shorter than the one of the training.

    `frames` divides the model's own number of positions: the slab then holds the excerpt several times over, and
    attention to copies of everything is attention to it.
    """

    samples: np.ndarray
    frames: int


class WhisperEncoder(OneShotModel):
    """Windows of samples in; each one's cross-attention keys and values out, into its slab."""

    slab: CacheSpec

    def __init__(self, model: WhisperForConditionalGeneration, make: MakeLinear | None = None) -> None:
        config = model.config
        self.encoder = model.model.encoder.eval().requires_grad_(False)
        parameter = next(self.encoder.parameters())
        self.samples = config.max_source_positions * STRIDE * HOP
        """Of one window; shorter ones are filled up with silence, as in training."""
        self.frames: int = config.max_source_positions
        self._shortened = {self.frames: self.encoder}
        self.features = LogMel(config.num_mel_bins).to(parameter.device)
        make = make or choose_operations(parameter.device, parameter.dtype).linear
        crosses = [layer.encoder_attn for layer in model.model.decoder.layers]
        self._projections = [merge(make, cross.k_proj, cross.v_proj) for cross in crosses]
        self._heads = config.decoder_attention_heads
        self._device, self._dtype = parameter.device, parameter.dtype
        dim = config.d_model // self._heads
        shape = (len(crosses), 2, config.max_source_positions, self._heads, dim)
        self.slab = CacheSpec("cross", shape, self._dtype, config.max_source_positions)

    def compatible(self, first: np.ndarray | Excerpt, item: np.ndarray | Excerpt) -> bool:
        return self._measure(first) == self._measure(item)

    def forward(self, items: list[np.ndarray | Excerpt], slabs: list[Tensor]) -> list[None]:
        """Items hold float32 at 16 kHz: arrays of at most `samples` samples, or excerpts, all of one length."""
        frames = self._measure(items[0])
        batch = torch.zeros(len(items), frames * STRIDE * HOP, pin_memory=self._device.type == "cuda")
        for row, item in zip(batch, items):
            samples = item.samples if isinstance(item, Excerpt) else item
            row[: len(samples)] = torch.from_numpy(samples)
        features = self.features(batch.to(self._device, non_blocking=True)).to(self._dtype)
        hidden = self._choose(frames)(features).last_hidden_state
        for layer, project in enumerate(self._projections):
            # (B, frames, 2, heads, dim), as the slabs have it: (2, frames, heads, dim)
            both = project(hidden).unflatten(-1, (2, self._heads, -1)).transpose(1, 2)
            if frames < self.frames:
                both = both.repeat(1, 1, self.frames // frames, 1, 1)
            torch._foreach_copy_([slab[layer] for slab in slabs], list(both.unbind(0)))
        return [None] * len(items)

    def _measure(self, item: np.ndarray | Excerpt) -> int:
        return item.frames if isinstance(item, Excerpt) else self.frames

    def _choose(self, frames: int) -> torch.nn.Module:
        """The encoder for windows of so many positions: the same weights, the first of its positions."""
        if frames not in self._shortened:
            self._shortened[frames] = shorten_encoder(self.encoder, frames)
        return self._shortened[frames]


def shorten_encoder(encoder: Any, frames: int) -> Any:
    """A view of `encoder` that takes windows of `frames` positions."""
    short = copy.copy(encoder)
    short._modules = dict(encoder._modules)
    short.config = copy.copy(encoder.config)
    short.config.max_source_positions = frames
    weight = encoder.embed_positions.weight[:frames]
    short.embed_positions = torch.nn.Embedding(frames, weight.shape[1], _weight=weight, _freeze=True)
    return short


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
