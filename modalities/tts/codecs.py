"""Neural codecs as one-shot stages: windows of frames become sound, each with as much of its past as it depends on."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.device import send
from polymux.core.errors import ModelError
from polymux.modalities.tts.field import find_halo, find_span, read_stack


@dataclass(frozen=True)
class CodeWindow:
    """`count` frames to decode, from frame `first` of `codes` on; what is around them is context."""

    codes: np.ndarray
    """(frames, codebooks) int64."""
    first: int
    count: int
    begin: int = 0
    """The number of the first frame of `codes` in the whole sound."""


class Codec(OneShotModel):
    """Windows in; float32 samples (count * hop) out, equal to that part of the whole."""

    rate: int
    """Samples a second."""
    hop: int
    """Samples of a frame."""
    left: int
    right: int
    """Frames of context that a window needs on either side."""
    codebooks: range
    """How many codes a frame may have."""
    size: int
    """Codes of a codebook; larger ids are a language model's own, and heard as the last code."""

    def window(self, codes: np.ndarray, start: int, end: int, usual: int) -> CodeWindow:
        """Frames `start` to `end` of (frames, codebooks) with their context. `usual`: how many frames a window has
        that is not the last; the last one gets more context instead, so that all of them can share a pass."""
        stop = min(end + self.right, len(codes))
        begin = max(min(start - self.left, stop - (self.left + usual + self.right)), 0)
        return CodeWindow(codes[begin:stop].clip(0, self.size - 1), start - begin, end - start, begin)

    @abstractmethod
    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]: ...


class MimiCodec(Codec):
    """Mimi (Défossez et al. 2024): causal throughout, so windows of any lengths share a pass.

    Its transformer looks back over a minute and is cheap; its convolutions look back over few frames and are not. The
    transformer runs over all of the context, the convolutions over the end of it.
    """

    def __init__(self, model: Any) -> None:
        """`model`: transformers' `MimiModel`; only what decodes is kept."""
        config = model.config
        if not config.use_causal_conv:
            raise ModelError("a Mimi codec whose convolutions are not causal cannot be streamed")
        model.set_attn_implementation("sdpa")  # a CSM's codec may share its configuration with the backbone
        decoder = model.decoder
        inner = hasattr(decoder, "decoder_seanet")  # transformers 5.2x moved the parts under `decoder`
        self.quantizer = model.quantizer
        self.upsample = decoder.upsample if inner else model.upsample
        self.transformer = decoder.decoder_transformer if inner else model.decoder_transformer
        self.convolutions = decoder.decoder_seanet if inner else decoder
        self.rate = config.sampling_rate
        self.codebooks = range(1, config.num_quantizers + 1)
        self.size = config.codebook_size
        self.stride = self.upsample.conv.stride[0] if self.upsample is not None else 1
        """Positions of the transformer for one frame."""
        self.step = int(np.prod(config.upsampling_ratios))
        """Samples of one such position."""
        self.hop = self.stride * self.step
        self.halo, self.right = find_halo(list(read_stack(self.convolutions)), self.step)
        """Positions that the convolutions look back."""
        if self.right:
            raise ModelError("a Mimi codec whose convolutions look ahead cannot be streamed")
        past = self.halo + len(self.transformer.layers) * (config.sliding_window - 1)
        stack = list(read_stack(self.upsample)) if self.upsample is not None else []
        self.left = -find_span(stack, -past, 0)[0]
        self._device = next(self.convolutions.parameters()).device
        keep_numbers_here(model)

    def forward(self, items: list[CodeWindow], slabs: list[Tensor]) -> list[Tensor]:
        padded = pad_sequence([torch.from_numpy(item.codes) for item in items], batch_first=True)
        codes = send(padded.numpy(), self._device)
        states = self.quantizer.decode(codes.transpose(1, 2))
        if self.upsample is not None:
            states = self.upsample(states)
        states = self.transformer(states.transpose(1, 2), use_cache=False).last_hidden_state
        starts = [max(item.first * self.stride - self.halo, 0) for item in items]
        ends = [(item.first + item.count) * self.stride for item in items]
        parts = [row[start:end] for row, start, end in zip(states, starts, ends)]
        sounds = self.convolutions(pad_sequence(parts, batch_first=True).transpose(1, 2))[:, 0].float()
        return [
            sound[(end - start) * self.step - item.count * self.hop : (end - start) * self.step]
            for sound, item, start, end in zip(sounds, items, starts, ends)
        ]


def keep_numbers_here(model: nn.Module) -> None:
    """A module's single integers belong to the host: Mimi's convolutions read their paddings at every pass, and from a
    card each would be waited for, with all that was launched before it."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.numel() == 1 and not buffer.is_floating_point():
                module._buffers[name] = buffer.cpu()


class DacCodec(Codec):
    """DAC (Kumar et al. 2023): convolutions that look both ways. Windows of one length share a pass: what stands
    behind the end of a shorter one would be heard."""

    def __init__(self, model: nn.Module) -> None:
        """`model`: transformers' `DacModel`; only what decodes is kept."""
        config: Any = model.config
        self.quantizer: Any = model.quantizer
        self.decoder: Any = model.decoder
        self.rate = config.sampling_rate
        self.codebooks = range(1, config.n_codebooks + 1)
        self.size = config.codebook_size
        self.hop = int(np.prod(config.upsampling_ratios))
        self.left, self.right = find_halo(list(read_stack(self.decoder)), self.hop)
        self._device = next(model.parameters()).device

    def compatible(self, first: CodeWindow, item: CodeWindow) -> bool:
        return len(first.codes) == len(item.codes)

    def forward(self, items: list[CodeWindow], slabs: list[Tensor]) -> list[Tensor]:
        codes = send(np.stack([item.codes for item in items]), self._device)
        states = self.quantizer.from_codes(codes.transpose(1, 2))[0]
        sounds = self.decoder(states)[:, 0].float()
        return [
            sound[item.first * self.hop : (item.first + item.count) * self.hop] for sound, item in zip(sounds, items)
        ]


CODECS: dict[str, type[MimiCodec | DacCodec]] = {"mimi": MimiCodec, "dac": DacCodec}
"""By `model_type`; SNAC, which transformers has not, is `snac.py`'s. EnCodec is not among them: its LSTM remembers
everything, so no window is wide enough."""


def make_codec(model: Any) -> Codec:
    """The codec of a transformers model. Raises `ModelError` for one that cannot be streamed."""
    kind = model.config.model_type
    if kind not in CODECS:
        raise ModelError(f"codec {kind!r} is not supported: use {', '.join(CODECS)} or snac")
    return CODECS[kind](model.eval().requires_grad_(False))
