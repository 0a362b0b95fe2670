"""What a modality supplies to the token family: a decoder over packed rows, and its shape."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.attention import PagedContext

if TYPE_CHECKING:
    from polymux.core.batch.depth import DepthModel
    from polymux.core.compute.adapters import AdapterSet


@dataclass(frozen=True)
class TokenShape:
    """What the cache must hold for a decoder: in each of `layers`, keys and values of `kv_heads` heads of `head_dim`
    numbers of `dtype`. `vocabulary` is how many tokens it tells apart."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    """The longest sequence the model can take."""
    dtype: torch.dtype
    axes: int = 1
    """Positions of one token: three where pictures stand in time, height and width."""


@dataclass(frozen=True)
class AdaptedTokens:
    """Tokens `start` to `end` of a packed batch, which one adapter changes."""

    start: int
    end: int
    weights: Tensor
    """(size,): the adapter's block, in the model's own layout."""


@dataclass
class TokenBatch:
    """The packed input of one launch: T tokens of R rows, of which S sample."""

    ids: Tensor
    """(T,) int64."""
    positions: Tensor
    """What rotary turns by: (T,) int64, or (axes, T) where a token stands at several positions at once. The places of
    the tokens in their rows are the context's."""
    sampled: Tensor
    """(S,) int64: places in the packed batch whose logits are wanted."""
    finals: Tensor
    """(S,) int64: the rows they belong to, counted in the batch."""
    context: PagedContext
    places: Tensor | None = None
    """(P,) int64: places in the packed batch that an encoder's vectors fill instead of tokens."""
    vectors: Tensor | None = None
    """(P, dim), or (P, dim times (1 + layers)): what follows is added behind each of the first layers."""
    adapted: Sequence[AdaptedTokens] = ()
    """In any order, none over another."""
    wants_hidden: bool = False
    hidden: Tensor | None = None
    """(T, dim): what the head was given, set by the model where it is wanted."""
    further: Tensor | None = None
    """(T, further ids) int64, with a depth model: what completes the units of drawn tokens. Others' are stale."""

    def embed(self, embedding: Callable[..., Tensor]) -> Tensor:
        """(T, dim): the tokens' embeddings, with the encoder's vectors in their places."""
        embedded = embedding(self.ids) if self.further is None else embedding(self.ids, self.further)
        if self.places is not None and self.vectors is not None:
            first = self.vectors[:, : embedded.shape[1]]
            embedded = embedded.index_copy(0, self.places, first.to(embedded.dtype))
        return embedded

    def split_layers(self, width: int) -> tuple[Tensor, ...]:
        """(P, width) per layer that the encoder's vectors go on to after the first (DeepStack, Meng et al. 2024)."""
        return () if self.vectors is None else self.vectors.split(width, dim=1)[1:]


class TokenModel(ABC):
    """What a modality supplies: a decoder over packed rows. It calls `context.attend` in every attention layer."""

    shape: TokenShape
    """What its cache must hold."""
    slab: CacheSpec | None = None
    """What an encoder leaves for each row's cross-attention; rows then read a holding of this class."""
    inlay: CacheSpec | None = None
    """What an encoder leaves to stand in prompts in place of tokens: (vectors, dim), or wider where some of it goes to
    later layers; rows then read a holding of it."""
    adapters: AdapterSet | None = None
    """What may be added to the model's weights; rows with an adapter hold a block of it."""
    depth: DepthModel | None = None
    """What completes a drawn token to a unit of several ids, from the state that the token's logits were made of."""
    recordable = False
    """On a CUDA device, a launch may be recorded as a graph: it looks at nothing on the host. Where a model does in
    launches with prompts, the log tells, and only its other launches are recorded."""

    @abstractmethod
    def forward(self, batch: TokenBatch) -> Tensor:
        """Logits at the sampled places: (S, vocabulary)."""
