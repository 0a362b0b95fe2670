"""FLUX-class transformers (diffusers' `FluxTransformer2DModel`) as denoisers: timestep and guidance per row.

A latent is the VAE's, (channels, height, width); two by two of its pixels make one token of the transformer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from torch import Tensor

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, Streams
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.errors import InvalidRequest
from polymux.modalities.diffusion import schedules
from polymux.modalities.diffusion.encoders import POOLED, PROMPT
from polymux.modalities.diffusion.merged import MergedFluxDouble, MergedFluxSingle, halve_rotary

GUIDANCE = "guidance"
"""Condition: the scale that a guidance-distilled transformer reads, () float32."""

GRIDS = 16
"""Resolutions whose rotary tables are kept on the device."""


@dataclass(frozen=True)
class Layout:
    """What the rows of a group share."""

    grid: tuple[int, int]
    """Picture tokens down and across."""
    rotary: tuple[Tensor, Tensor]
    """Cosines and sines, (text tokens + picture tokens, head dim) each."""
    halves: tuple[Tensor, Tensor]
    """The same, as merged blocks read them."""


class FluxDenoiser(BlockModel):
    """Predicts velocities. The transformer's own modules run; the walk through them is ours."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer: Any = transformer
        self.transformer.eval().requires_grad_(False)
        self.dtype = self.transformer.dtype
        self.dim = self.transformer.inner_dim
        self._blocks = [*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks]
        self._doubles: list[MergedFluxDouble] = []
        self._singles: list[MergedFluxSingle] = []
        self._layout = lru_cache(GRIDS)(self._make_layout)

    def merge(self) -> list[torch.nn.Module]:
        """Take the blocks' weights into merged ones, and give those. The transformer's own are gone after that."""
        model = self.transformer
        for place, block in enumerate(model.transformer_blocks):
            self._doubles.append(MergedFluxDouble(block))
            if place:
                model.transformer_blocks[place] = torch.nn.Identity()
            else:  # its first norm is what a step cache measures by
                block.attn = block.ff = block.ff_context = torch.nn.Identity()
        for place, block in enumerate(model.single_transformer_blocks):
            self._singles.append(MergedFluxSingle(block))
            model.single_transformer_blocks[place] = torch.nn.Identity()
        self._blocks = self._blocks[:1]
        return [*self._doubles, *self._singles]

    def tokens(self, request: DenoiseRequest) -> int:
        _, height, width = request.shape
        return (height // 2) * (width // 2)

    def size(self, request: DenoiseRequest) -> int:
        return self.tokens(request) + request.conditions[0][PROMPT].shape[0]

    def embed(self, batch: DenoiseBatch) -> Streams:
        """Rounded like diffusers' pipeline: the timestep to the model's dtype first, then divided, then multiplied."""
        model = self.transformer
        tokens = pack_latents(batch.latents.to(self.dtype))
        text = batch.gather(PROMPT).to(self.dtype)
        time = batch.timesteps.to(self.dtype) / 1000 * 1000
        pooled = batch.gather(POOLED).to(self.dtype)
        if model.config.guidance_embeds:
            guidance = batch.gather(GUIDANCE).to(self.dtype) * 1000
            modulation = model.time_text_embed(time, guidance, pooled)
        else:
            modulation = model.time_text_embed(time, pooled)
        grid = (batch.latents.shape[-2] // 2, batch.latents.shape[-1] // 2)
        beside = {"text": model.context_embedder(text), "modulation": modulation}
        return Streams(model.x_embedder(tokens), beside, self._layout(grid, text.shape[1]))

    def head(self, streams: Streams) -> Streams:
        if self._doubles:
            return _run_merged(self._doubles[:1], [], streams)
        return _run_block(self._blocks[0], streams)

    def body(self, streams: Streams) -> Streams:
        if self._doubles:
            return _run_merged(self._doubles[1:], self._singles, streams)
        for block in self._blocks[1:]:
            streams = _run_block(block, streams)
        return streams

    def finish(self, streams: Streams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.beside["modulation"])
        return unpack_latents(self.transformer.proj_out(hidden).float(), streams.shared.grid)

    def modulate(self, streams: Streams) -> Tensor:
        return self._blocks[0].norm1(streams.hidden, emb=streams.beside["modulation"])[0]

    def _make_layout(self, grid: tuple[int, int], text_tokens: int) -> Layout:
        height, width = grid
        positions = torch.zeros(text_tokens + height * width, 3, device=self.transformer.device)
        picture = positions[text_tokens:].view(height, width, 3)
        picture[..., 1] = torch.arange(height, device=positions.device)[:, None]
        picture[..., 2] = torch.arange(width, device=positions.device)[None, :]
        cos, sin = self.transformer.pos_embed(positions)
        return Layout(grid, (cos, sin), halve_rotary(cos, sin))


def _run_block(block: torch.nn.Module, streams: Streams) -> Streams:
    text, hidden = block(
        hidden_states=streams.hidden,
        encoder_hidden_states=streams.beside["text"],
        temb=streams.beside["modulation"],
        image_rotary_emb=streams.shared.rotary,
    )
    return replace(streams, hidden=hidden, beside={**streams.beside, "text": text})


def _run_merged(doubles: list[MergedFluxDouble], singles: list[MergedFluxSingle], streams: Streams) -> Streams:
    hidden, text, modulation = streams.hidden, streams.beside["text"], streams.beside["modulation"]
    cos, sin = streams.shared.halves
    for double in doubles:
        hidden, text = double(hidden, text, modulation, cos, sin)
    if singles:
        joined = torch.cat([text, hidden], 1)
        for single in singles:
            joined = single(joined, modulation, cos, sin)
        text, hidden = joined[:, : text.shape[1]], joined[:, text.shape[1] :]
    return replace(streams, hidden=hidden, beside={**streams.beside, "text": text})


def pack_latents(latents: Tensor) -> Tensor:
    """(P, channels, height, width) -> (P, height/2 * width/2, channels * 4)."""
    rows, channels, height, width = latents.shape
    split = latents.view(rows, channels, height // 2, 2, width // 2, 2)
    return split.permute(0, 2, 4, 1, 3, 5).reshape(rows, (height // 2) * (width // 2), channels * 4)


def unpack_latents(tokens: Tensor, grid: tuple[int, int]) -> Tensor:
    """The inverse of `pack_latents`; `grid` is (height/2, width/2)."""
    height, width = grid
    rows, _, features = tokens.shape
    split = tokens.view(rows, height, width, features // 4, 2, 2)
    return split.permute(0, 3, 1, 4, 2, 5).reshape(rows, features // 4, height * 2, width * 2)


def make_schedule(template: Any, steps: int, shape: tuple[int, ...]) -> Any:
    """The schedule of a latent of `shape`. Raises `InvalidRequest` for one that does not divide into tokens."""
    _, height, width = shape
    if height % 2 or width % 2:
        raise InvalidRequest("width and height must be multiples of 16", param="size")
    return schedules.make_schedule(template, steps, (height // 2) * (width // 2), linear=True)
