"""A text embedder: one packed pass over many texts, without padding, then the pooling the model was published with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.body import Body, pack_texts
from polymux.core.compute.load import prepare_body
from polymux.core.text.flat import flatten
from polymux.modalities.llm.modules import Dense, read_modules
from polymux.modalities.llm.pooling import POOLS

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

REHEARSED, LONGEST_REHEARSED = 4096, 2048
"""Tokens of a pass, and of a text, that are tried before the first request."""

FIRST = 2
"""Positions that some models do not count from."""


@dataclass(frozen=True)
class EmbedItem:
    """Some texts of one request. `dimensions` keeps the first so many values; `normalize` scales to unit length after
    that."""

    ids: np.ndarray
    """(T,): the tokens of one text behind those of another."""
    lengths: np.ndarray
    """(texts,): tokens of each."""
    dimensions: int | None
    normalize: bool


class TextEmbedder(OneShotModel):
    """Token ids in, float32 vectors out: (texts, dimensions) per item."""

    def __init__(self, body: Body, site: Site, *poolings: str, dense: Sequence[torch.nn.Module] = ()) -> None:
        """The results of several `poolings` are concatenated; `dense` layers follow in turn."""
        config = body.config
        self.body = body
        self.poolings = [POOLS[pooling] for pooling in poolings]
        self.dense = torch.nn.Sequential(*dense).eval().requires_grad_(False)
        self.dtype = body.dtype
        last = [layer for layer in dense if isinstance(layer, torch.nn.Linear)][-1:]
        self.dimensions: int = last[0].out_features if last else config.hidden_size * len(poolings)
        self._device = site.device
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._attention = site.packed_attention(self.dtype, dim)

    @classmethod
    def load(
        cls,
        files: ModelFiles,
        site: Site,
        dtype: torch.dtype,
        *,
        tier: str = "fast",
        quantization: str | None = None,
    ) -> TextEmbedder:
        """From a model folder. Raises `ModelError` for a module that is not supported, `ConfigError` for an unknown
        tier or quantization."""
        modules = read_modules(files)
        model = AutoModel.from_pretrained(files.folder, dtype=dtype).to(site.device.torch)
        layers = [layer for dense in modules.dense for layer in load_dense(files, dense)]
        body = prepare_body(model, tier=tier, quantization=quantization, quantizers=site.quantizers)
        return cls(body, site, *modules.poolings, dense=[layer.to(site.device.torch) for layer in layers])

    def forward(self, items: list[EmbedItem], slabs: list[Tensor]) -> list[Tensor]:
        ids, lengths = (np.concatenate([getattr(item, part) for item in items]) for part in ("ids", "lengths"))
        texts = pack_texts(ids, lengths, self._device, self._attention)
        hidden = self.body.run(texts.ids, texts.places, None, texts.context)
        vectors = self.dense(torch.cat([pool(hidden, texts) for pool in self.poolings], dim=-1))
        sizes = [len(item.lengths) for item in items]
        if len({(item.dimensions, item.normalize) for item in items}) == 1:  # the usual case, in one step
            return list(_finish(vectors, items[0]).split(sizes))
        return [_finish(part, item) for part, item in zip(vectors.split(sizes), items)]

    def rehearse(self, most: int) -> None:
        """Texts of many lengths, alone and together."""
        longest = getattr(self.body.config, "max_position_embeddings", LONGEST_REHEARSED) - FIRST
        longest = min(most, longest, LONGEST_REHEARSED)
        lengths = [1 << bits for bits in range(3, longest.bit_length()) if 1 << bits < longest]
        for length in (*lengths, longest):
            for count in (1, max(REHEARSED // length, 1)):
                self.forward([EmbedItem(*flatten([[0] * length] * count), None, True)], [])


def _finish(vectors: Tensor, item: EmbedItem) -> Tensor:
    vectors = vectors[:, : item.dimensions]
    return torch.nn.functional.normalize(vectors, dim=1) if item.normalize else vectors


def load_dense(files: ModelFiles, dense: Dense) -> list[torch.nn.Module]:
    """The layer and its activation, in float32 like what is pooled."""
    layer = torch.nn.Linear(dense.inputs, dense.outputs, bias=dense.bias)
    weights = load_file(files.path(f"{dense.folder}/model.safetensors"))
    layer.load_state_dict({name.removeprefix("linear."): weight.float() for name, weight in weights.items()})
    return [layer, getattr(torch.nn, dense.activation)()]
