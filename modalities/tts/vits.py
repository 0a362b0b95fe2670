"""VITS (Kim et al. 2021) as three one-shot models around transformers' modules.

    VitsReader   ids -> how long each is heard, and the prior it is drawn from
    VitsFlow     the prior, stretched to those lengths, -> latents of the whole utterance
    VitsVocoder  a window of latents -> samples, equal to that part of the whole (`vits_vocoder`)

What is random is drawn on the device from the utterance's own seed, as transformers draws it there for one utterance
alone. Only how long each id is heard comes to the host.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from polymux.core.batch.oneshot import OneShotModel, Parted
from polymux.core.compute.device import send
from polymux.modalities.tts.convolutions import bake

SPREAD, CARD_SPREAD = 1.5, 8.0
"""Utterances share a pass while none is so many times as long as the first: what is padded is computed, too. On a card
a pass of reading or of the flow costs its launches, whatever it computes."""

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64)
"""Utterances of a pass on a card; others are filled up. A card's library plans each convolution anew for each shape,
which takes longer than the convolution: few shapes, planned before the first request, are worth some idle rows."""

IDS, FRAMES = 32, 64
"""Lengths of passes on a card are multiples of these."""


@dataclass(frozen=True)
class Utterance:
    """What is said in one breath."""

    ids: list[int]
    speaker: int | None
    pace: float
    seed: int


@dataclass(frozen=True)
class Expansion:
    """An utterance that was read. `counts`, (T,) on the host: frames of each id; `prior`, (T, 2 dim) on the device:
    means and log variances. `frames`: their sum, and one at least."""

    utterance: Utterance
    counts: Tensor
    prior: Tensor
    frames: int


class VitsPart(OneShotModel):
    """What the three have in common: where they run, and how passes on a card are filled up."""

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

    def similar(self, one: int, other: int) -> bool:
        """Whether utterances so long may share a pass."""
        return max(one, other) <= (CARD_SPREAD if self.rounds else SPREAD) * min(one, other)

    def send(self, batch: Tensor) -> Tensor:
        return send(batch.contiguous().numpy(), self.device)

    def condition(self, speakers: list[int | None]) -> Tensor | None:
        """(B, embedding, 1) of the speakers; None for a model of one."""
        if self.config.num_speakers <= 1 or any(speaker is None for speaker in speakers):
            return None
        return self.speakers(self.send(torch.tensor(speakers)))[..., None]


class VitsReader(VitsPart):
    """Returns per utterance a `Parted`: frames of each id, (T,) float32, and the prior of each, (T, 2 dim) float32."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.encoder = model.text_encoder
        self.durations = model.duration_predictor
        self.noise_scale: float = model.noise_scale_duration
        self.pace: float = model.speaking_rate

    def compatible(self, first: Utterance, item: Utterance) -> bool:
        return self.similar(len(first.ids), len(item.ids)) and (first.speaker is None) == (item.speaker is None)

    def forward(self, items: list[Utterance], slabs: list[Tensor]) -> list[Parted]:
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
            latents = torch.zeros(len(items), 2, ids.shape[1], device=self.device)
            for row, item in zip(latents, wanted):
                draw_durations(torch.Generator(self.device).manual_seed(item.seed), row[:, : len(item.ids)])
            log = self._draw_durations(states, padding, condition, latents.to(self.dtype) * self.noise_scale)
        else:
            log = self.durations(states, padding, condition)
        paces = self.send(torch.tensor([item.pace * self.pace for item in items]))[:, None]
        counts = torch.ceil(torch.exp(log[:, 0].float()) * padding[:, 0] / paces)
        prior = torch.cat([read.prior_means, read.prior_log_variances], dim=-1).float()
        counts = counts.masked_fill(~torch.isfinite(prior).all(dim=-1), float("nan"))
        return [Parted(row[: len(item.ids)], kept[: len(item.ids)]) for row, kept, item in zip(counts, prior, wanted)]

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


class VitsFlow(VitsPart):
    """Returns per utterance its latents (frames, dim), which stay on the device."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.flow = bake(model.flow)
        self.noise_scale: float = model.noise_scale

    def compatible(self, first: Expansion, item: Expansion) -> bool:
        speakers = (first.utterance.speaker is None) == (item.utterance.speaker is None)
        return self.similar(first.frames, item.frames) and speakers

    def forward(self, items: list[Expansion], slabs: list[Tensor]) -> list[Tensor]:
        wanted, items = items, self.fill(items)
        prior = self._draw(items, wanted).to(self.dtype).transpose(1, 2)
        lengths = self.send(torch.tensor([item.frames for item in items]))
        padding = (torch.arange(prior.shape[2], device=self.device) < lengths[:, None])[:, None].to(self.dtype)
        condition = self.condition([item.utterance.speaker for item in items])
        latents = self.flow(prior, padding, condition, reverse=True).transpose(1, 2).contiguous()
        return [row[: item.frames] for row, item in zip(latents, wanted)]

    def _draw(self, items: list[Expansion], wanted: list[Expansion]) -> Tensor:
        """The priors at every frame, drawn: (B, T, dim). Nothing is drawn for what only fills the pass."""
        priors = pad_sequence([item.prior for item in items], batch_first=True)
        priors = torch.cat([priors, priors.new_zeros(len(items), 1, priors.shape[2])], dim=1)
        frames = max(item.frames for item in items)
        frames += -frames % FRAMES if self.rounds else 0
        # what has no id is drawn from the zeros behind them: one frame of silence, as in transformers
        places = np.full((len(items), frames), priors.shape[1] - 1, np.int64)
        for row, item in zip(places, items):
            spread = np.repeat(np.arange(len(item.counts)), item.counts.numpy().astype(np.int64))
            row[: len(spread)] = spread
        index = send(places, self.device)[..., None].expand(-1, -1, priors.shape[2])
        means, log_variances = priors.gather(1, index).chunk(2, dim=2)
        noise = torch.zeros_like(means)
        for row, item in zip(noise, wanted):
            generator = torch.Generator(self.device).manual_seed(item.utterance.seed)
            if self.config.use_stochastic_duration_prediction:  # which were drawn first
                draw_durations(generator, row.new_empty(2, len(item.utterance.ids)))
            row[: item.frames].T[None].normal_(generator=generator)
        return means + noise * torch.exp(log_variances) * self.noise_scale


def draw_durations(generator: torch.Generator, into: Tensor) -> None:
    """Standard normal numbers, (2, T)."""
    into.copy_(torch.randn(1, *into.shape, generator=generator, device=into.device)[0])
