"""What the transformers of pictures have in common: a row of blocks over square patches of a latent."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import nn

from polymux.core.batch.denoiser import BlockModel, Streams, Wrap, keep_layer
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.modalities.diffusion.encoders import PROMPT


class TransformerDenoiser(BlockModel):
    """Walks through one of diffusers' transformers. Its own modules run, one block after the other."""

    def __init__(self, transformer: Any, blocks: Sequence[nn.Module], patch: int) -> None:
        """`patch`: latent pixels along the side of one token."""
        self.transformer = transformer.eval().requires_grad_(False)
        self.dtype = transformer.dtype
        self.dim = transformer.inner_dim
        self.patch = patch
        self.blocks = list(blocks)

    @abstractmethod
    def run(self, block: Any, streams: Streams) -> Streams:
        """One block."""

    def tokens(self, request: DenoiseRequest) -> int:
        _, height, width = request.shape
        return (height // self.patch) * (width // self.patch)

    def size(self, request: DenoiseRequest) -> int:
        return self.tokens(request) + max(condition[PROMPT].shape[0] for condition in request.conditions)

    def merge(self, wrap: Wrap = keep_layer) -> Sequence[nn.Module]:
        return self.blocks

    def head(self, streams: Streams) -> Streams:
        return self.run(self.blocks[0], streams)

    def body(self, streams: Streams) -> Streams:
        for block in self.blocks[1:]:
            streams = self.run(block, streams)
        return streams
