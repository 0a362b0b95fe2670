"""Whisper's encoder on the runtime, and both halves of a model from its folder.

The encoder's pass takes samples, and leaves every decoder layer's cross-attention keys and values in the window's
slab, where the decoder's rows read them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, WhisperForConditionalGeneration

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.fast.layers import MakeLinear, merge
from polymux.core.compute.fast.operations import choose_operations
from polymux.core.errors import ModelError
from polymux.modalities.asr.decoder import WhisperDecoder
from polymux.modalities.asr.encoder import Encoder
from polymux.modalities.asr.features import HOP, LogMel

if TYPE_CHECKING:
    from polymux.core.compute.triton.slabs import Dealer

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


class Ear:
    """One encoder, and the projections of all decoder layers that hear through it."""

    def __init__(self, encoder: nn.Module, make: MakeLinear) -> None:
        self.source: nn.Module | None = encoder
        """As transformers has it, until it is settled who hears through it."""
        self.projections: list[nn.Module] = []
        """Each makes one layer's cross-attention keys and values, side by side."""
        self._make = make
        self._encoder: Encoder | None = None

    def settle(self) -> Encoder:
        """What runs; the source is forgotten."""
        if self._encoder is None:
            self._encoder, self.source = Encoder(self.source, self._make), None
        return self._encoder

    def listen(self, features: Tensor) -> Iterator[Tensor]:
        """Layer by layer the keys and values, (B, frames, 2 * width), of spectrograms of 2 * frames columns."""
        hidden = self.settle().run(features)
        for project in self.projections:
            yield project(hidden)


class WhisperEncoder(OneShotModel):
    """Windows of samples in; each one's cross-attention keys and values out, into its slab."""

    slab: CacheSpec

    def __init__(self, model: WhisperForConditionalGeneration, make: MakeLinear | None = None) -> None:
        self.config = config = model.config
        parameter = next(model.model.encoder.parameters())
        self.samples = config.max_source_positions * STRIDE * HOP
        """Of one window; shorter ones are filled up with silence, as in training."""
        self.frames: int = config.max_source_positions
        self.features = LogMel(config.num_mel_bins).to(parameter.device)
        self._ears: list[Ear] = []
        self._heads = config.decoder_attention_heads
        self._device, self._dtype = parameter.device, parameter.dtype
        self._make = make or choose_operations(parameter.device, parameter.dtype).linear
        self.attach(model)

    def attach(self, model: WhisperForConditionalGeneration) -> int:
        """From now on slabs also hold what the decoder of `model` reads; from which of their layers on.

        It hears the same windows, in as many mel bins, and has the same heads. Where its encoder is the one that is
        here, that runs once for both. To be called before stages are opened, and before `settle`.
        """
        above = sum(len(ear.projections) for ear in self._ears)
        ears = (ear for ear in self._ears if ear.source is not None and same_weights(ear.source, model.model.encoder))
        ear = next(ears, None)
        if ear is None:
            ear = Ear(model.model.encoder, self._make)
            self._ears.append(ear)
        crosses = [layer.encoder_attn for layer in model.model.decoder.layers]
        ear.projections += [merge(self._make, cross.k_proj, cross.v_proj) for cross in crosses]
        shape = (above + len(crosses), 2, self.frames, self._heads, self.config.d_model // self._heads)
        self.slab = CacheSpec("cross", shape, self._dtype, self.frames)
        return above

    def settle(self) -> None:
        """Nobody else will be attached: encoders are put together, and transformers' own are let go."""
        for ear in self._ears:
            ear.settle()

    def compatible(self, first: np.ndarray | Excerpt, item: np.ndarray | Excerpt) -> bool:
        return self._measure(first) == self._measure(item)

    def forward(self, items: list[np.ndarray | Excerpt], slabs: list[Tensor]) -> list[None]:
        """Items hold float32 at 16 kHz: arrays of at most `samples` samples, or excerpts, all of one length."""
        frames = self._measure(items[0])
        batch = torch.empty(len(items), frames * STRIDE * HOP, pin_memory=self._device.type == "cuda")
        for row, item in zip(batch, items):
            samples = item.samples if isinstance(item, Excerpt) else item
            row[: len(samples)] = torch.from_numpy(samples)
            row[len(samples) :] = 0.0
        features = self.features(batch.to(self._device, non_blocking=True)).to(self._dtype)
        heard = chain.from_iterable(ear.listen(features) for ear in self._ears)
        dealer = self._open_dealer(slabs) if frames == self.frames else None
        for layer, projected in enumerate(heard):
            if dealer is not None:
                dealer.deal(projected, layer)
                continue
            # (B, frames, 2, heads, dim), as the slabs have it: (2, frames, heads, dim)
            both = projected.unflatten(-1, (2, self._heads, -1)).transpose(1, 2)
            if frames < self.frames:
                both = both.repeat(1, 1, self.frames // frames, 1, 1)
            torch._foreach_copy_([slab[layer] for slab in slabs], list(both.unbind(0)))
        return [None] * len(items)

    def _open_dealer(self, slabs: list[Tensor]) -> Dealer | None:
        """On a card, what writes a layer of all slabs in one launch."""
        if self._device.type != "cuda":
            return None
        from polymux.core.compute.triton.slabs import Dealer

        return Dealer(slabs) if slabs[0].dtype == self._dtype and Dealer.fits(slabs) else None

    def _measure(self, item: np.ndarray | Excerpt) -> int:
        return item.frames if isinstance(item, Excerpt) else self.frames


def same_weights(encoder: nn.Module, other: nn.Module) -> bool:
    """Whether both compute the same: models are distilled with the encoder of their teacher."""
    ours, theirs = encoder.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def load_whisper(folder: Path, device: torch.device, dtype: torch.dtype) -> WhisperForConditionalGeneration:
    """The model in `folder`. Raises `ModelError` for one that is no Whisper, or cannot be loaded."""
    try:
        config = AutoConfig.from_pretrained(folder)
        if config.model_type != "whisper":
            raise ModelError(f"the model in {folder} is no Whisper, but of type {config.model_type!r}")
        model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a Whisper model from {folder}: {error}") from error
    return model.eval().to(device)  # type: ignore[no-any-return, arg-type]


def split_whisper(
    model: WhisperForConditionalGeneration, make: MakeLinear | None = None
) -> tuple[WhisperEncoder, WhisperDecoder]:
    """The encoder and the decoder of one model; it belongs to them from now on."""
    encoder = WhisperEncoder(model, make)
    return encoder, WhisperDecoder(model, encoder.slab, make)
