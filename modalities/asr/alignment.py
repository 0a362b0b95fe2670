"""What each token was heard at: the alignment heads' cross-attention, in one pass over tokens that are known already.

No attention kernel gives its weights away, so those heads alone are computed again, explicitly. The rows of any
recordings and sockets share a pass; each reads the slab that its text was decoded from.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.batch.tokens import TokenBatch
from polymux.core.cache.blocks import view_blocks
from polymux.core.cache.holding import Holding
from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, PagedContext
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.modalities.asr.decoder import WhisperDecoder

SMOOTH = 7
"""Frames of the median filter, as Whisper's authors have it."""

UNPLANNED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""Attention for shapes that are never the same twice. Torch's first choice on a card, cuDNN, plans each new shape on
the host for longer than the whole pass takes without."""


@dataclass(frozen=True)
class Reading:
    """`tokens` as the decoder read them, prompt included, from slab `block`.

    The window has `frames` positions (an excerpt's fewer are in the slab several times over), of which the first
    `sounding` hold sound.
    """

    tokens: list[int]
    block: int
    frames: int
    sounding: int


class Aligner(OneShotModel):
    """`Reading`s in; for each a tensor (tokens, sounding) out: how much what follows each token was heard where.

    Values are comparable along a row and along a column: over tokens they have mean 0 and deviation 1, per head.
    """

    def __init__(self, decoder: WhisperDecoder, heads: Sequence[tuple[int, int]], site: Site) -> None:
        """`heads` are (layer, head)."""
        self._decoder = decoder
        self._slabs = view_blocks(site.arena, decoder.slab)
        self._backend = site.attention(decoder.shape.dtype, decoder.shape.head_dim)
        self._device = site.device.torch
        self._heads: dict[int, list[int]] = {}
        for layer, head in heads:
            self._heads.setdefault(layer, []).append(head)

    def compatible(self, first: Any, item: Any) -> bool:
        return first.frames == item.frames

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Tensor]:
        ids = torch.tensor([token for item in items for token in item.tokens], device=self._device)
        positions = torch.cat([torch.arange(len(item.tokens)) for item in items]).to(self._device)
        context = AligningContext(self._backend, self._slabs, items, self._heads)
        last = ids.new_tensor([len(ids) - 1])
        with sdpa_kernel(UNPLANNED):
            self._decoder.run(TokenBatch(ids, positions, last, last, context))
        weights = torch.cat(context.found, dim=1)
        return [average(found[:, : len(item.tokens)], item.sounding) for found, item in zip(weights, items)]


class AligningContext(PagedContext):
    """Rows see themselves and their slabs, nothing is cached; the weights of some heads are kept."""

    def __init__(
        self, backend: AttentionBackend, slabs: Tensor, items: list[Reading], heads: dict[int, list[int]]
    ) -> None:
        lengths = [len(item.tokens) for item in items]
        self.backend = SimpleNamespace(recordable=False)  # type: ignore[assignment]
        self.found: list[Tensor] = []
        """By layer: (rows, heads, longest row, frames)."""
        self._packed = backend.packed
        self._slabs = slabs[..., : items[0].frames, :, :]  # one copy of an excerpt is as good as all of them
        self._heads = heads
        self._rows = PackedRows([0, *itertools.accumulate(lengths)])
        self._shape = (len(items), max(lengths))
        places = [row * max(lengths) + place for row, length in enumerate(lengths) for place in range(length)]
        self._places = torch.tensor(places, device=slabs.device)
        self._blocks = torch.tensor([item.block for item in items], device=slabs.device)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        return self._packed(query, key, value, self._rows, options)

    def attend_slab(self, layer: int, query: Tensor, options: AttentionOptions) -> Tensor:
        """(T, heads, dim) queries of all rows, padded to the longest for this."""
        rows, longest = self._shape
        padded = query.new_zeros(rows * longest, *query.shape[1:])
        padded[self._places] = query
        asked = padded.unflatten(0, (rows, longest)).transpose(1, 2)
        key, value = (each.transpose(1, 2) for each in self._slabs[:, layer][self._blocks].unbind(dim=1))
        if layer in self._heads:
            heads = self._heads[layer]
            scores = asked[:, heads].float() @ key[:, heads].float().transpose(2, 3) * options.scale
            self.found.append(scores.softmax(dim=-1))
        mixed = scaled_dot_product_attention(asked, key, value, scale=options.scale)
        return mixed.transpose(1, 2).flatten(0, 1)[self._places]


def average(weights: Tensor, sounding: int) -> Tensor:
    """(heads, tokens, frames) to (tokens, sounding): over tokens normalised, over frames smoothed, the heads mean."""
    weights = weights[..., :sounding]
    deviation, mean = torch.std_mean(weights, dim=1, keepdim=True, correction=0)
    weights = (weights - mean) / deviation.clamp(min=1e-6)
    half = SMOOTH // 2
    if sounding > half:  # reflection needs so many frames
        weights = pad(weights, (half, half), mode="reflect").unfold(-1, SMOOTH, 1).sort(dim=-1).values[..., half]
    return weights.mean(dim=0)


def choose_heads(published: Sequence[Sequence[int]] | None, layers: int, heads: int) -> list[tuple[int, int]]:
    """The heads that a model says follow the sound; all of its upper half where it does not say."""
    if published:
        return [(layer, head) for layer, head in published]
    return list(itertools.product(range(layers // 2, layers), range(heads)))


def open_alignment(model: OneShotModel, site: Site) -> OneShotStage:
    return OneShotStage("align", model, site, max_units=site.settings.max_units, to_host=True)


def start_alignment(job: Job, stage: OneShotStage, reading: Reading, slab: Holding) -> OneShotRow:
    row = OneShotRow(job, reading, len(reading.tokens))
    row.reads = [slab]
    return job.start(stage, row)
