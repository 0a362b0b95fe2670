"""A cross-encoder: pairs of texts in one packed pass, without padding, then the model's own head over each pair."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPooling

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.body import pack_texts
from polymux.core.compute.load import prepare_body
from polymux.core.text.flat import flatten
from polymux.modalities.llm.pooling import POOLS

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

    def __init__(self, model: torch.nn.Module, site: Site, *, tier: str = "fast") -> None:
        config: Any = model.config
        prefix = str(model.base_model_prefix)
        body = getattr(model, prefix)
        self.body = prepare_body(body, tier=tier)
        self.dtype = self.body.dtype
        self._decoder = hasattr(model, "score")
        self._finished = _Finished(body)
        if not self._decoder:
            setattr(model, prefix, self._finished)
        head: Any = model.score if self._decoder else model  # what the body has taken over is not kept twice
        self._head = head.eval().requires_grad_(False)
        self._device = site.device
        heads = config.num_attention_heads
        dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        self._attention = site.packed_attention(self.dtype, dim)
        self._typed = bool(getattr(config, "type_vocab_size", 0))
        averaged = getattr(config, "classifier_pooling", "cls") == "mean"
        self._pool = POOLS["last" if self._decoder else "mean" if averaged else "cls"]
        """What the head looks at."""

    @classmethod
    def load(cls, files: ModelFiles, site: Site, dtype: torch.dtype, *, tier: str = "fast") -> CrossEncoder:
        model = AutoModelForSequenceClassification.from_pretrained(files.folder, dtype=dtype)
        return cls(model.to(site.device.torch), site, tier=tier)

    @classmethod
    def judge(
        cls, files: ModelFiles, site: Site, dtype: torch.dtype, words: tuple[int, int], *, tier: str = "fast"
    ) -> CrossEncoder:
        """A language model whose score is how much likelier the first of two words is than the second."""
        model: Any = AutoModelForCausalLM.from_pretrained(files.folder, dtype=dtype)
        return cls.ask(model.to(site.device.torch), site, words, tier=tier)

    @classmethod
    def ask(cls, model: Any, site: Site, words: tuple[int, int], *, tier: str = "fast") -> CrossEncoder:
        """The same for a model that is loaded."""
        yes, no = words
        head = model.get_output_embeddings().weight.detach()
        score = torch.nn.Linear(head.shape[1], 1, bias=False, device=head.device, dtype=head.dtype)
        score.weight.data.copy_(head[yes] - head[no])  # the sigmoid of a difference is the softmax over the two
        model.score = score
        return cls(model, site, tier=tier)

    def forward(self, items: list[PairItem], slabs: list[Tensor]) -> list[Any]:
        texts = pack_texts(*flatten([item.ids for item in items]), self._device, self._attention)
        segments = None
        if self._typed:
            flat = chain.from_iterable(item.segments for item in items)
            segments = self._device.send(np.fromiter(flat, np.int64, len(texts.ids)))
        hidden = self.body.run(texts.ids, texts.places, segments, texts.context)
        read = self._pool(hidden, texts).to(self.dtype)
        if self._decoder:
            scores = self._head(read)
        else:
            self._finished.hidden = read[:, None]
            ones = texts.ids.new_ones(len(items), 1)
            scores = self._head(input_ids=ones, attention_mask=ones).logits
        return list(scores.float().sigmoid().flatten().split(1))
