"""Transformers of the Stable Diffusion 3 kind (diffusers' `SD3Transformer2DModel`) as denoisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, Streams
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.modalities.diffusion.encoders import POOLED, PROMPT


class StableDiffusion3Denoiser(BlockModel):
    """Predicts velocities. Picture and text flow through the blocks together; the last block drops the text."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        self.transformer: Any = transformer
        self.transformer.eval().requires_grad_(False)
        self.dtype = self.transformer.dtype
        self.dim = self.transformer.inner_dim
        self._patch = self.transformer.config.patch_size
        self._blocks = list(self.transformer.transformer_blocks)

    def tokens(self, request: DenoiseRequest) -> int:
        _, height, width = request.shape
        return (height // self._patch) * (width // self._patch)

    def size(self, request: DenoiseRequest) -> int:
        return self.tokens(request) + request.conditions[0][PROMPT].shape[0]

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.transformer
        hidden = model.pos_embed(batch.latents.to(self.dtype))
        modulation = model.time_text_embed(batch.timesteps, batch.gather(POOLED).to(self.dtype))
        text = model.context_embedder(batch.gather(PROMPT).to(self.dtype))
        return Streams(hidden, {"text": text, "modulation": modulation}, tuple(batch.latents.shape[-2:]))

    def merge(self) -> list[torch.nn.Module]:
        return list(self._blocks)

    def head(self, streams: Streams) -> Streams:
        return _run_block(self._blocks[0], streams)

    def body(self, streams: Streams) -> Streams:
        for block in self._blocks[1:]:
            streams = _run_block(block, streams)
        return streams

    def finish(self, streams: Streams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.beside["modulation"])
        return unpatchify(self.transformer.proj_out(hidden), streams.shared, self._patch).float()

    def modulate(self, streams: Streams) -> Tensor:
        return self._blocks[0].norm1(streams.hidden, emb=streams.beside["modulation"])[0]


def _run_block(block: torch.nn.Module, streams: Streams) -> Streams:
    text, hidden = block(
        hidden_states=streams.hidden,
        encoder_hidden_states=streams.beside["text"],
        temb=streams.beside["modulation"],
    )
    beside = streams.beside if text is None else {**streams.beside, "text": text}
    return replace(streams, hidden=hidden, beside=beside)


def unpatchify(tokens: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """(P, tokens, patch * patch * channels) -> (P, channels, height, width)."""
    height, width = size[0] // patch, size[1] // patch
    split = tokens.reshape(len(tokens), height, width, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", split).reshape(len(tokens), -1, height * patch, width * patch)
