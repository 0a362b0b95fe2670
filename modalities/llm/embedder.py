"""A text embedder: one packed pass over many texts, without padding, then the pooling the model was published with."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModel

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.compute.attention import PackedContext
from polymux.core.compute.quantization import quantize_model
from polymux.core.compute.reference import KEYWORD, prepare_reference
from polymux.modalities.llm.modules import Dense, read_modules

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles


@dataclass(frozen=True)
class EmbedItem:
    """One text. `dimensions` keeps the first so many values; `normalize` scales to unit length after that."""

    ids: list[int]
    dimensions: int | None
    normalize: bool


class TextEmbedder(OneShotModel):
    """Token ids in, one float32 vector per text out."""

    def __init__(
        self, model: torch.nn.Module, site: Site, *poolings: str, dense: Sequence[torch.nn.Module] = ()
    ) -> None:
        """The results of several `poolings` are concatenated; `dense` layers follow in turn."""
        config: Any = model.config
        self.model = prepare_reference(model)
        self.poolings = [_POOLS[pooling] for pooling in poolings]
        self.dense = torch.nn.Sequential(*dense).eval().requires_grad_(False)
        self.dtype = next(model.parameters()).dtype
        last = [layer for layer in dense if isinstance(layer, torch.nn.Linear)][-1:]
        self.dimensions: int = last[0].out_features if last else config.hidden_size * len(poolings)
        self._device = site.device.torch
        heads = config.num_attention_heads
        self._attention = site.attention(self.dtype, getattr(config, "head_dim", None) or config.hidden_size // heads)
        self._offset = first_position(model)
        self._typed = bool(getattr(model.config, "type_vocab_size", 0))

    @classmethod
    def load(cls, files: ModelFiles, site: Site, dtype: torch.dtype, quantization: str | None = None) -> TextEmbedder:
        """From a model folder. Raises `ModelError` for a module that is not supported, `ConfigError` for an unknown
        quantization."""
        modules = read_modules(files)
        model = AutoModel.from_pretrained(files.folder, dtype=dtype).to(site.device.torch)
        quantize_model(model, quantization, site.device.torch, site.quantizers)
        layers = [layer for dense in modules.dense for layer in load_dense(files, dense)]
        return cls(model, site, *modules.poolings, dense=[layer.to(site.device.torch) for layer in layers])

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
        vectors = self.dense(self._pool(hidden.float(), starts))
        return [_finish(vector, item) for vector, item in zip(vectors, items)]

    def _pool(self, hidden: Tensor, starts: list[int]) -> Tensor:
        """(T, d) to (texts, d times the number of poolings)."""
        texts = [hidden[start:end] for start, end in itertools.pairwise(starts)]
        return torch.cat([torch.stack([pool(text) for text in texts]) for pool in self.poolings], dim=-1)


def _weigh(text: Tensor) -> Tensor:
    """The mean in which later tokens weigh more (SGPT, Muennighoff 2022)."""
    weights = torch.arange(1, len(text) + 1, device=text.device, dtype=text.dtype)
    return weights @ text / weights.sum()


_POOLS: dict[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda text: text[0],
    "last": lambda text: text[-1],
    "max": lambda text: text.amax(dim=0),
    "mean": lambda text: text.mean(dim=0),
    "mean_sqrt_len": lambda text: text.sum(dim=0) / len(text) ** 0.5,
    "weightedmean": _weigh,
}
"""A text's hidden states (tokens, d) to one vector (d,)."""


def _finish(vector: Tensor, item: EmbedItem) -> Tensor:
    vector = vector[: item.dimensions]
    return torch.nn.functional.normalize(vector, dim=0) if item.normalize else vector


def load_dense(files: ModelFiles, dense: Dense) -> list[torch.nn.Module]:
    """The layer and its activation, in float32 like what is pooled."""
    layer = torch.nn.Linear(dense.inputs, dense.outputs, bias=dense.bias)
    weights = load_file(files.path(f"{dense.folder}/model.safetensors"))
    layer.load_state_dict({name.removeprefix("linear."): weight.float() for name, weight in weights.items()})
    return [layer, getattr(torch.nn, dense.activation)()]


def first_position(model: torch.nn.Module) -> int:
    """RoBERTa-like embeddings number positions from behind the padding index."""
    padding = getattr(getattr(model, "embeddings", None), "padding_idx", None)
    return 0 if padding is None else padding + 1
