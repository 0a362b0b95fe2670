"""HiFi-GAN, the vocoder of VITS, as a one-shot model over windows: each equals that part of the whole."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymux.modalities.tts.convolutions import widen
from polymux.modalities.tts.field import Branches, Convolution, Stack, find_halo
from polymux.modalities.tts.vits import ROWS, VitsPart

EDGE = 7
"""Kernel of the vocoder's first and last convolution; transformers has it fixed, too."""

IDLE = 512
"""Frames that may be computed for nobody, to save a pass on a card: about what its launches cost."""


@dataclass(frozen=True)
class LatentWindow:
    """Frames `start` to `end` of `latents`, (frames of the whole utterance, dim). `usual`: how many frames a window has
    that is not the last; the last one gets more context instead, so that all of them can share a pass."""

    latents: Tensor
    start: int
    end: int
    speaker: int | None
    usual: int = 0
    rounded: bool = False
    """int16 samples are wanted, as they are told; else float32 ones."""


class VitsVocoder(VitsPart):
    """`halo`: frames on either side that a window's samples depend on. Takes the model's decoder for itself."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.decoder = widen(model.decoder)
        self.arrange(torch.channels_last)
        self.hop = int(np.prod(self.config.upsample_rates))
        self.halo = max(find_halo(read_vocoder(self.config), self.hop))
        self.usual: list[int] = []
        """Frames that windows have; the first is what every utterance begins with."""

    def rehearse(self, most: int) -> None:
        """Every window in passes of every size, in the layout in which the largest pass is faster."""
        windows = [self._imagine(0, self.usual[0]), *(self._imagine(self.halo, size) for size in self.usual)]
        passes = [[window] * rows for window in windows for rows in ROWS if rows * self.measure(window) <= most]
        largest = max(passes, key=lambda items: len(items) * self.measure(items[0]))
        layouts = (torch.contiguous_format, torch.channels_last)
        self.arrange(min(layouts, key=lambda layout: self._try(largest, layout)))
        for items in passes:
            self.forward(items, [])

    def _imagine(self, start: int, size: int) -> LatentWindow:
        shape = (start + size + self.halo, self.config.flow_size)
        latents = torch.zeros(shape, dtype=self.dtype, device=self.device)
        return LatentWindow(latents, start, start + size, 0 if self.config.num_speakers > 1 else None, size)

    def _try(self, items: list[LatentWindow], layout: torch.memory_format) -> float:
        """Seconds of a pass in a layout."""
        self.arrange(layout)
        self.forward(items, [])[-1].cpu()
        began = time.perf_counter()
        self.forward(items, [])[-1].cpu()
        return time.perf_counter() - began

    def arrange(self, layout: torch.memory_format) -> None:
        """Compute in a layout from now on."""
        self.layout = layout
        self.decoder.to(memory_format=layout)  # type: ignore[call-overload]

    def compatible(self, first: LatentWindow, item: LatentWindow) -> bool:
        """Of one length: what stands behind the end of a shorter one would be heard."""
        speakers = (first.speaker is None) == (item.speaker is None)
        return self.measure(first) == self.measure(item) and speakers

    def begin(self, item: LatentWindow) -> int:
        """The first frame of the window's context."""
        stop = min(item.end + self.halo, len(item.latents))
        return max(min(item.start - self.halo, stop - (item.usual + 2 * self.halo)), 0)

    def measure(self, item: LatentWindow) -> int:
        """Frames that the window is computed from."""
        return min(item.end + self.halo, len(item.latents)) - self.begin(item)

    def forward(self, items: list[LatentWindow], slabs: list[Tensor]) -> list[Tensor]:
        return [sound for part in self._share(items) for sound in self._speak(part)]

    def _share(self, items: list[LatentWindow]) -> Iterator[list[LatentWindow]]:
        """The items in passes. What would fill up a pass that they almost fill costs less than one more pass."""
        length = self.measure(items[0])
        while self.rounds and items:
            fitting = [rows for rows in ROWS if rows <= len(items) or (rows - len(items)) * length <= IDLE]
            rows = max(fitting)
            yield items[:rows]
            items = items[rows:]
        if items:
            yield items

    def _speak(self, items: list[LatentWindow]) -> list[Tensor]:
        wanted, items = items, self.fill(items)
        latents = torch.stack([item.latents[self.begin(item) : item.end + self.halo] for item in items])
        condition = self.condition([item.speaker for item in items])
        sounds = self.decode(latents.to(self.dtype), None if condition is None else condition[..., None])
        rounded = quantize(sounds) if any(item.rounded for item in wanted) else sounds
        firsts = [(item.start - self.begin(item)) * self.hop for item in items]
        return [
            (rounded if item.rounded else sounds)[row, first : first + (item.end - item.start) * self.hop]
            for row, (item, first) in enumerate(zip(wanted, firsts))
        ]

    def decode(self, latents: Tensor, condition: Tensor | None) -> Tensor:
        """(B, T, dim), and (B, embedding, 1, 1) of the speakers, -> samples (B, T * hop), float32."""
        image = latents[:, None].permute(0, 3, 1, 2).contiguous(memory_format=self.layout)
        return self.decoder(image, condition)[:, 0, 0].float()


def quantize(samples: Tensor) -> Tensor:
    """int16, cut at full scale; what is no number is silent: as `telling.quantize` does on the host."""
    return (samples.nan_to_num(posinf=1.0, neginf=-1.0).clamp(-1, 1) * 32767).round().to(torch.int16)


def read_vocoder(config: Any) -> Stack:
    """The vocoder's convolutions."""
    stack: list[Convolution | Branches] = [_centred(EDGE)]
    for rate, kernel in zip(config.upsample_rates, config.upsample_kernel_sizes):
        stack.append(Convolution(kernel, rate, before=(kernel - rate) // 2, transposed=True))
        blocks = [
            tuple(layer for dilation in dilations for layer in (_centred(size, dilation), _centred(size)))
            for size, dilations in zip(config.resblock_kernel_sizes, config.resblock_dilation_sizes)
        ]
        stack.append(Branches(tuple(blocks)))
    return [*stack, _centred(EDGE)]


def _centred(kernel: int, dilation: int = 1) -> Convolution:
    return Convolution(kernel, dilation=dilation, before=(kernel * dilation - dilation) // 2)
