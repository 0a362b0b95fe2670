"""FLUX-class transformers (diffusers' `FluxTransformer2DModel`) as denoisers: timestep and guidance per row.

A latent is the VAE's, (channels, height, width); two by two of its pixels make one token of the transformer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler, FluxTransformer2DModel
from torch import Tensor

from polymux.core.batch.denoise import DenoiseBatch, DenoiseModel
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.errors import InvalidRequest

PROMPT = "prompt"
"""Condition: the text encoder's token embeddings, (text tokens, joint dim)."""

POOLED = "pooled"
"""Condition: the pooled text embedding, (pooled dim,)."""

GUIDANCE = "guidance"
"""Condition: the scale that a guidance-distilled transformer reads, () float32."""

GRIDS = 16
"""Resolutions whose rotary tables are kept on the device."""


@dataclass(frozen=True)
class FluxStreams:
    """What flows through the blocks: P rows of T picture tokens and S text tokens."""

    hidden: Tensor
    """(P, T, dim)."""
    text: Tensor
    """(P, S, dim)."""
    modulation: Tensor
    """(P, dim), from timestep, guidance and pooled text."""
    rotary: tuple[Tensor, Tensor]
    """(S + T, head dim) each, cosines and sines, shared by the rows."""
    grid: tuple[int, int]
    """Picture tokens down and across."""


class FluxDenoiser(DenoiseModel):
    """Predicts velocities. The transformer's own modules run; the walk through them is ours."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        self.transformer = transformer.eval().requires_grad_(False)
        self.dtype = transformer.dtype
        self._rotary = lru_cache(GRIDS)(self._compute_rotary)

    def size(self, request: DenoiseRequest) -> int:
        _, height, width = request.shape
        return (height // 2) * (width // 2) + request.conditions[0][PROMPT].shape[0]

    def forward(self, batch: DenoiseBatch) -> Tensor:
        streams = self.embed(batch)
        for block in (*self.transformer.transformer_blocks, *self.transformer.single_transformer_blocks):
            streams = _run_block(block, streams)
        return self.finish(streams)

    def embed(self, batch: DenoiseBatch) -> FluxStreams:
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
        rotary = self._rotary(grid, text.shape[1])
        return FluxStreams(model.x_embedder(tokens), model.context_embedder(text), modulation, rotary, grid)

    def finish(self, streams: FluxStreams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.modulation)
        return unpack_latents(self.transformer.proj_out(hidden).float(), streams.grid)

    def _compute_rotary(self, grid: tuple[int, int], text_tokens: int) -> tuple[Tensor, Tensor]:
        height, width = grid
        positions = torch.zeros(text_tokens + height * width, 3, device=self.transformer.device)
        picture = positions[text_tokens:].view(height, width, 3)
        picture[..., 1] = torch.arange(height, device=positions.device)[:, None]
        picture[..., 2] = torch.arange(width, device=positions.device)[None, :]
        return self.transformer.pos_embed(positions)


def _run_block(block: torch.nn.Module, streams: FluxStreams) -> FluxStreams:
    text, hidden = block(
        hidden_states=streams.hidden,
        encoder_hidden_states=streams.text,
        temb=streams.modulation,
        image_rotary_emb=streams.rotary,
    )
    return replace(streams, text=text, hidden=hidden)


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


def make_schedule(
    template: FlowMatchEulerDiscreteScheduler, steps: int, shape: tuple[int, ...]
) -> FlowMatchEulerDiscreteScheduler:
    """A scheduler of the template's kind with its timesteps set, shifted for the latent's resolution.

    Raises `InvalidRequest` for a latent that does not divide into tokens.
    """
    _, height, width = shape
    if height % 2 or width % 2:
        raise InvalidRequest("width and height must be multiples of 16", param="size")
    scheduler = type(template).from_config(template.config)
    config = scheduler.config
    sigmas = None if config.get("use_flow_sigmas") else np.linspace(1.0, 1 / steps, steps)
    options = {"mu": shift_for((height // 2) * (width // 2), config)} if config.get("use_dynamic_shifting") else {}
    if sigmas is None:
        scheduler.set_timesteps(steps, **options)
    else:
        scheduler.set_timesteps(sigmas=sigmas, **options)
    return scheduler


def shift_for(tokens: int, config: dict) -> float:
    """The shift's exponent, linear in the number of picture tokens, as the scheduler's configuration says."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (high - low)
    return slope * tokens + config.get("base_shift", 0.5) - slope * low
