"""VITS (Kim et al. 2021) as three one-shot models around transformers' modules.

    VitsReader   ids -> how long each is heard, and the prior it is drawn from
    VitsFlow     the prior, stretched to those lengths, -> latents of the whole utterance
    VitsVocoder  a window of latents -> samples, equal to that part of the whole

What is random is drawn from the utterance's own seed, as transformers draws it for one utterance alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.device import send
from polymux.modalities.tts.field import Branches, Convolution, Stack, find_halo

SPREAD = 1.5
"""Utterances share a pass while the longest is at most so many times the shortest."""

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Utterances of a pass on a card; others are filled up. A card's library plans each convolution anew for each shape,
which takes longer than the convolution: few shapes, planned before the first request, are worth some idle rows."""

IDS, FRAMES = 32, 64
"""Lengths of passes on a card are multiples of these."""

EDGE = 7
"""Kernel of the vocoder's first and last convolution; transformers has it fixed, too."""


@dataclass(frozen=True)
class Utterance:
    """What is said in one breath."""

    ids: list[int]
    speaker: int | None
    pace: float
    seed: int


@dataclass(frozen=True)
class Expansion:
    """An utterance that was read: `read` is what `VitsReader` made of it, on the host."""

    utterance: Utterance
    read: Tensor
    frames: int


@dataclass(frozen=True)
class LatentWindow:
    """Frames `start` to `end` of `latents`, (frames of the whole utterance, dim). `usual`: how many frames a window has
    that is not the last; the last one gets more context instead, so that all of them can share a pass."""

    latents: Tensor
    start: int
    end: int
    speaker: int | None
    usual: int = 0


class _Part(OneShotModel):
    def __init__(self, model: Any) -> None:
        self.config = model.config
        self.device = next(model.parameters()).device
        self.dtype = next(model.parameters()).dtype
        self.speakers: Any = getattr(model, "embed_speaker", None)
        self.rounds = self.device.type == "cuda"
        """Shapes of passes are rounded up."""

    def fill(self, items: list[Any]) -> list[Any]:
        """As many as a pass has: some again, where there are fewer."""
        if not self.rounds:
            return items
        rows = next((rows for rows in ROWS if rows >= len(items)), len(items))
        return [*items, *items[:1] * (rows - len(items))]

    def pad(self, batch: Tensor, unit: int) -> Tensor:
        """(B, T, ...), T rounded up to whole units by zeros."""
        if not self.rounds:
            return batch
        missing = -batch.shape[1] % unit
        return torch.cat([batch, batch.new_zeros(len(batch), missing, *batch.shape[2:])], dim=1)

    def send(self, batch: Tensor) -> Tensor:
        return send(batch.contiguous().numpy(), self.device)

    def condition(self, speakers: list[int | None]) -> Tensor | None:
        """(B, embedding, 1) of the speakers; None for a model of one."""
        if self.config.num_speakers <= 1 or any(speaker is None for speaker in speakers):
            return None
        return self.speakers(self.send(torch.tensor(speakers)))[..., None]


class VitsReader(_Part):
    """Returns per utterance (T, 1 + 2 dim) float32: frames of each id, then means and log variances of its prior."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.encoder = model.text_encoder
        self.durations = model.duration_predictor
        self.noise_scale: float = model.noise_scale_duration
        self.pace: float = model.speaking_rate

    def compatible(self, first: Utterance, item: Utterance) -> bool:
        return similar(len(first.ids), len(item.ids)) and (first.speaker is None) == (item.speaker is None)

    def forward(self, items: list[Utterance], slabs: list[Tensor]) -> list[Tensor]:
        wanted, items = items, self.fill(items)
        padded = pad_sequence([torch.tensor(item.ids) for item in items], batch_first=True)
        ids = self.send(self.pad(padded, IDS))
        lengths = self.send(torch.tensor([len(item.ids) for item in items]))
        mask = torch.arange(ids.shape[1], device=self.device) < lengths[:, None]
        padding = mask[:, None].to(self.dtype)
        read = self.encoder(input_ids=ids, padding_mask=padding.transpose(1, 2), attention_mask=mask.long())
        condition = self.condition([item.speaker for item in items])
        states = read.last_hidden_state.transpose(1, 2)
        if self.config.use_stochastic_duration_prediction:
            noise = [draw_noise(item.seed, len(item.ids))[0].T for item in items]
            latents = self.send(self.pad(pad_sequence(noise, batch_first=True), IDS)).transpose(1, 2)
            latents = latents.to(self.dtype)
            log = self._draw_durations(states, padding, condition, latents * self.noise_scale)
        else:
            log = self.durations(states, padding, condition)
        paces = self.send(torch.tensor([item.pace * self.pace for item in items]))[:, None, None]
        frames = torch.ceil(torch.exp(log.float()) * padding / paces)
        whole = torch.cat([frames.transpose(1, 2), read.prior_means.float(), read.prior_log_variances.float()], dim=-1)
        return [row[: len(item.ids)] for row, item in zip(whole, wanted)]

    def _draw_durations(self, states: Tensor, padding: Tensor, condition: Tensor | None, latents: Tensor) -> Tensor:
        """The stochastic predictor backwards (section 2.2.2), from latents that were drawn elsewhere."""
        predictor = self.durations
        states = predictor.conv_pre(states)
        if condition is not None:
            states = states + predictor.cond(condition)
        states = predictor.conv_proj(predictor.conv_dds(states, padding)) * padding
        first, _, *others = predictor.flows  # the second flow back would change only what nobody reads
        for flow in [*reversed(others), first]:
            latents, _ = flow(latents.flip(1), padding, global_conditioning=states, reverse=True)
        return latents[:, :1]


class VitsFlow(_Part):
    """Returns per utterance its latents (frames, dim), which stay on the device."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.flow = model.flow
        self.noise_scale: float = model.noise_scale

    def compatible(self, first: Expansion, item: Expansion) -> bool:
        speakers = (first.utterance.speaker is None) == (item.utterance.speaker is None)
        return similar(first.frames, item.frames) and speakers

    def forward(self, items: list[Expansion], slabs: list[Tensor]) -> list[Tensor]:
        priors = self.fill([self._draw(item) for item in items])
        wanted, items = items, self.fill(items)
        prior = self.send(self.pad(pad_sequence(priors, batch_first=True), FRAMES)).transpose(1, 2).to(self.dtype)
        lengths = self.send(torch.tensor([item.frames for item in items]))
        padding = (torch.arange(prior.shape[2], device=self.device) < lengths[:, None])[:, None].to(self.dtype)
        condition = self.condition([item.utterance.speaker for item in items])
        latents = self.flow(prior, padding, condition, reverse=True)
        return [row[:, : item.frames].T for row, item in zip(latents, wanted)]

    def _draw(self, item: Expansion) -> Tensor:
        """The utterance's prior at every frame, drawn: (frames, dim)."""
        counts = item.read[:, 0].long()
        if not counts.any():  # one frame of silence, as in transformers
            expanded = torch.zeros(1, item.read.shape[1] - 1)
        else:
            expanded = item.read[:, 1:].repeat_interleave(counts, dim=0)
        means, log_variances = expanded.chunk(2, dim=1)
        tokens = len(item.utterance.ids) if self.config.use_stochastic_duration_prediction else 0
        noise = draw_noise(item.utterance.seed, tokens, item.frames, means.shape[1])[1]
        return means + noise * torch.exp(log_variances) * self.noise_scale


class VitsVocoder(_Part):
    """HiFi-GAN over windows. `halo`: frames on either side that a window's samples depend on."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.decoder = model.decoder
        self.hop = int(np.prod(self.config.upsample_rates))
        self.halo = max(find_halo(read_vocoder(self.config), self.hop))
        self.usual: list[int] = []
        """Frames of the windows that utterances are told in, in turn."""

    def rehearse(self, most: int) -> None:
        """Every window in passes of every size."""
        dim = self.decoder.conv_pre.in_channels
        for start, size in zip(accumulate(self.usual, initial=0), self.usual):
            latents = torch.zeros(start + size + self.halo, dim, dtype=self.dtype, device=self.device)
            window = LatentWindow(latents, start, start + size, 0 if self.config.num_speakers > 1 else None, size)
            for rows in ROWS:
                if rows * size <= most:
                    self.forward([window] * rows, [])

    def compatible(self, first: LatentWindow, item: LatentWindow) -> bool:
        """Of one length: what stands behind the end of a shorter one would be heard."""
        speakers = (first.speaker is None) == (item.speaker is None)
        return len(self.cut(first)) == len(self.cut(item)) and speakers

    def begin(self, item: LatentWindow) -> int:
        """The first frame of the window's context."""
        stop = min(item.end + self.halo, len(item.latents))
        return max(min(item.start - self.halo, stop - (item.usual + 2 * self.halo)), 0)

    def cut(self, item: LatentWindow) -> Tensor:
        """The window's frames with its halo, as far as there are any."""
        return item.latents[self.begin(item) : item.end + self.halo]

    def forward(self, items: list[LatentWindow], slabs: list[Tensor]) -> list[Tensor]:
        wanted, items = items, self.fill(items)
        latents = torch.stack([self.cut(item) for item in items]).transpose(1, 2).to(self.dtype)
        sounds = self.decoder(latents, self.condition([item.speaker for item in items]))[:, 0].float()
        firsts = [(item.start - self.begin(item)) * self.hop for item in items]
        return [
            sound[first : first + (item.end - item.start) * self.hop]
            for sound, item, first in zip(sounds, wanted, firsts)
        ]


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


def draw_noise(seed: int, tokens: int, frames: int = 0, dim: int = 0) -> tuple[Tensor, Tensor]:
    """Standard normal numbers for durations (2, tokens) and then for latents (frames, dim), one row of numbers."""
    generator = torch.Generator().manual_seed(seed)
    durations = torch.randn(1, 2, tokens, generator=generator)[0] if tokens else torch.zeros(2, 0)
    latents = torch.empty(1, frames, dim).transpose(1, 2).normal_(generator=generator)
    return durations, latents[0].T


def similar(one: int, other: int) -> bool:
    return max(one, other) <= SPREAD * min(one, other)
