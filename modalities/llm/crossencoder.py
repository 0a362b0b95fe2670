"""A cross-encoder: pairs of texts in one packed pass, without padding, then the model's own head over each pair."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import AutoModelForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.attention import PackedContext
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.modalities.llm.embedder import first_position

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles


@dataclass(frozen=True)
class PairItem:
    """Two texts as one sequence of tokens; `segments` says which of the two each belongs to."""

    ids: list[int]
    segments: list[int]


class _Finished(torch.nn.Module):
    """Stands where the model's body was, and hands its head what the body made of a packed batch."""

    def __init__(self, body: torch.nn.Module) -> None:
        super().__init__()
        self.pooler = getattr(body, "pooler", None)
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> BaseModelOutputWithPooling:
        pooled = self.pooler(self.hidden) if self.pooler is not None else None
        return BaseModelOutputWithPooling(last_hidden_state=self.hidden, pooler_output=pooled)


class CrossEncoder(OneShotModel):
    """Pairs in, one score from 0 to 1 per pair out.

    An encoder's head reads the first token or, as its configuration may say, the mean; a decoder's reads the last.
    """

    def __init__(self, model: torch.nn.Module, site: Site) -> None:
        config: Any = model.config
        prefix = str(model.base_model_prefix)
        self.body = prepare_reference(getattr(model, prefix))
        self.dtype = next(model.parameters()).dtype
        self._decoder = hasattr(model, "score")
        self._head = model.eval().requires_grad_(False)
        self._finished = _Finished(self.body)
        if not self._decoder:
            setattr(model, prefix, self._finished)
        self._device = site.device.torch
        heads = config.num_attention_heads
        self._attention = site.attention(self.dtype, getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._offset = first_position(self.body)
        self._typed = bool(getattr(config, "type_vocab_size", 0))
        self._averaged = getattr(config, "classifier_pooling", "cls") == "mean"
        self._segments = int(getattr(config, "type_vocab_size", 0) or 0)

    @classmethod
    def load(cls, files: ModelFiles, site: Site, dtype: torch.dtype) -> CrossEncoder:
        model = AutoModelForSequenceClassification.from_pretrained(files.folder, dtype=dtype)
        return cls(model.to(site.device.torch), site)

    def forward(self, items: list[PairItem], slabs: list[Tensor]) -> list[Any]:
        starts = [0]
        for item in items:
            starts.append(starts[-1] + len(item.ids))
        ids = torch.tensor([token for item in items for token in item.ids], device=self._device)
        positions = torch.cat([torch.arange(len(item.ids)) for item in items]).to(self._device) + self._offset
        inputs: dict[str, Any] = {}
        if self._typed:
            segments = [min(segment, self._segments - 1) for item in items for segment in item.segments]
            inputs["token_type_ids"] = torch.tensor(segments, device=self._device)[None]
        context = {KEYWORD: PackedContext(self._attention, starts)}
        if self._decoder:
            inputs["use_cache"] = False
        hidden = self.body(input_ids=ids[None], position_ids=positions[None], **context, **inputs).last_hidden_state[0]
        if self._decoder:
            scores = self._head.score(hidden[torch.tensor(starts[1:], device=self._device) - 1])
        else:
            texts = [hidden[start:end] for start, end in itertools.pairwise(starts)]
            self._finished.hidden = torch.stack([self._read(text) for text in texts])[:, None]
            ones = torch.ones(len(items), 1, dtype=torch.int64, device=self._device)
            scores = self._head(input_ids=ones, attention_mask=ones).logits
        return list(scores.float().sigmoid().flatten().split(1))

    def _read(self, text: Tensor) -> Tensor:
        """What an encoder's head looks at."""
        return text.mean(dim=0) if self._averaged else text[0]
