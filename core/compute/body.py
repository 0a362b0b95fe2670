"""Transformers without a head over packed rows: token ids to hidden states, on the reference tier or the fast one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionBackend, PackedContext
from polymux.core.compute.device import Device
from polymux.core.compute.reference import KEYWORD, prepare_reference


class Body(ABC):
    """T tokens of some rows, packed. Places count from 0 in each row."""

    config: Any
    dtype: torch.dtype

    @abstractmethod
    def run(self, ids: Tensor, places: Tensor, segments: Tensor | None, context: PackedContext) -> Tensor:
        """(T,) int64 each, on the model's device, to the last hidden states, (T, d).

        `segments` says which of two texts a token belongs to, 0 or 1; None is all 0. Models without kinds of token
        look past it.
        """


class TransformersBody(Body):
    """An untouched transformers model, with our attention."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = prepare_reference(model)
        self.config = model.config
        self.dtype = next(model.parameters()).dtype
        self.first = first_position(model)
        self.kinds = int(getattr(model.config, "type_vocab_size", 0) or 0)
        """Kinds of token that its embeddings tell apart."""

    def run(self, ids: Tensor, places: Tensor, segments: Tensor | None, context: PackedContext) -> Tensor:
        inputs: dict[str, Any] = {}
        if self.kinds:
            inputs["token_type_ids"] = read_kinds(ids, segments, self.kinds)[None]
        return self.model(
            input_ids=ids[None],
            position_ids=places[None] + self.first,
            use_cache=False,
            **{KEYWORD: context},
            **inputs,
        ).last_hidden_state[0]


def read_kinds(ids: Tensor, segments: Tensor | None, kinds: int) -> Tensor:
    """(T,): each token's kind, as far as a model with so many tells them apart."""
    return torch.zeros_like(ids) if segments is None else segments.clamp(max=kinds - 1)


def first_position(model: torch.nn.Module) -> int:
    """RoBERTa-like embeddings number positions from behind the padding index."""
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1


@dataclass(frozen=True)
class PackedTexts:
    """Token ids of several texts, one behind the other: (T,) int64 each, and (texts + 1,) for where they start."""

    ids: Tensor
    places: Tensor
    """Counted from 0 in each text."""
    starts: Tensor
    context: PackedContext


def pack_texts(ids: np.ndarray, lengths: np.ndarray, device: Device, attention: AttentionBackend) -> PackedTexts:
    """Texts as `text.flat` gives them. One copy to the device, for which nobody waits. No text is empty."""
    starts = np.concatenate([[0], lengths.cumsum()])
    total = int(starts[-1])
    places = np.arange(total) - np.repeat(starts[:-1], lengths)
    sent = device.send(np.concatenate([ids, places, starts]))
    sent_ids, sent_places, sent_starts = sent.split([total, total, len(starts)])
    context = PackedContext(attention, starts.tolist(), sent_starts.to(torch.int32))
    return PackedTexts(sent_ids, sent_places, sent_starts, context)
