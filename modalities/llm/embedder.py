"""A text embedder: one packed pass over many texts, without padding, then the pooling the model was published with."""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModel

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.attention import PackedContext
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.core.errors import ModelError

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POOLINGS = {
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_lasttoken": "last",
}
"""Keys of a sentence-transformers pooling module, and what they mean here."""


@dataclass(frozen=True)
class EmbedItem:
    """One text. `dimensions` keeps the first so many values; `normalize` scales to unit length after that."""

    ids: list[int]
    dimensions: int | None
    normalize: bool


class TextEmbedder(OneShotModel):
    """Token ids in, one float32 vector per text out."""

    def __init__(self, model: torch.nn.Module, site: Site, pooling: str) -> None:
        self.model = prepare_reference(model)
        self.pooling = pooling
        self.dtype = next(model.parameters()).dtype
        self.dimensions: int = model.config.hidden_size
        self._device = site.device.torch
        self._attention = site.attention(self.dtype, self.dimensions // model.config.num_attention_heads)
        self._offset = _first_position(model)
        self._typed = bool(getattr(model.config, "type_vocab_size", 0))

    @classmethod
    def load(cls, files: ModelFiles, site: Site, dtype: torch.dtype) -> TextEmbedder:
        """From a model folder. Raises `ModelError` for a pooling that is not supported."""
        model = AutoModel.from_pretrained(files.folder, dtype=dtype).to(site.device.torch)
        return cls(model, site, read_pooling(files))

    def forward(self, items: list[EmbedItem], slabs: list[Tensor]) -> list[Tensor]:
        starts = [0]
        for item in items:
            starts.append(starts[-1] + len(item.ids))
        ids = torch.tensor([token for item in items for token in item.ids], device=self._device)
        positions = torch.cat([torch.arange(len(item.ids)) for item in items]).to(self._device) + self._offset
        inputs: dict[str, Any] = {"token_type_ids": torch.zeros_like(ids)[None]} if self._typed else {}
        hidden = self.model(
            input_ids=ids[None],
            position_ids=positions[None],
            use_cache=False,
            **{KEYWORD: PackedContext(self._attention, starts)},
            **inputs,
        ).last_hidden_state[0]
        vectors = self._pool(hidden.float(), starts)
        return [_finish(vector, item) for vector, item in zip(vectors, items)]

    def _pool(self, hidden: Tensor, starts: list[int]) -> Tensor:
        """(T, d) to (texts, d)."""
        if self.pooling == "cls":
            return hidden[torch.tensor(starts[:-1], device=hidden.device)]
        if self.pooling == "last":
            return hidden[torch.tensor(starts[1:], device=hidden.device) - 1]
        return torch.stack([hidden[start:end].mean(dim=0) for start, end in itertools.pairwise(starts)])


def _finish(vector: Tensor, item: EmbedItem) -> Tensor:
    vector = vector[: item.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if item.normalize else vector


def read_pooling(files: ModelFiles) -> str:
    """How the model's authors pool: mean unless the folder says otherwise."""
    name = "1_Pooling/config.json"
    if not files.has(name):
        return "mean"
    config = json.loads(files.path(name).read_text())
    chosen = [key for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if len(chosen) != 1 or chosen[0] not in POOLINGS:
        raise ModelError(f"{files.reference} pools by {', '.join(chosen) or 'nothing'}: not supported yet")
    return POOLINGS[chosen[0]]


def _first_position(model: torch.nn.Module) -> int:
    """RoBERTa-like embeddings number positions from behind the padding index."""
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1
