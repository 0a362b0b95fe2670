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
from torch.nn.functional import silu

from polymux.core.batch.denoiser import DenoiseBatch, Streams, Wrap, keep_layer
from polymux.core.errors import InvalidRequest
from polymux.modalities.diffusion import schedules
from polymux.modalities.diffusion.encoders import POOLED, PROMPT
from polymux.modalities.diffusion.merged import Merged, halve_rotary
from polymux.modalities.diffusion.merged_flux import MergedFluxDouble, MergedFluxSingle, Steps, TorchSteps
from polymux.modalities.diffusion.transformer import TransformerDenoiser

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


class FluxDenoiser(TransformerDenoiser):
    """Predicts velocities. The transformer's own modules run; the walk through them is ours."""

    def __init__(self, transformer: FluxTransformer2DModel) -> None:
        blocks = [*transformer.transformer_blocks, *transformer.single_transformer_blocks]
        super().__init__(transformer, blocks, 2)
        self._steps: Steps = TorchSteps()
        self._doubles: list[MergedFluxDouble] = []
        self._singles: list[MergedFluxSingle] = []
        self._modulations: list[torch.nn.Module] = []
        """Of the first block, and of all others together: they are mostly the reading of weights."""
        self._layout = lru_cache(GRIDS)(self._make_layout)

    def merge(self, wrap: Wrap = keep_layer, steps: Steps | None = None) -> list[torch.nn.Module]:
        """Take the blocks' weights into merged ones, and give those. The transformer's own are gone after that."""
        model, steps = self.transformer, steps or TorchSteps()
        self._steps = steps
        modulations = [
            *([block.norm1.linear, block.norm1_context.linear] for block in model.transformer_blocks),
            *([block.norm.linear] for block in model.single_transformer_blocks),
        ]
        for layers in (modulations[0], [layer for each in modulations[1:] for layer in each]):
            self._modulations.append(wrap(Merged(layers), *layers))
        for place, block in enumerate(model.transformer_blocks):
            self._doubles.append(MergedFluxDouble(block, steps, wrap))
            if place:
                model.transformer_blocks[place] = torch.nn.Identity()
            else:  # its first norm is what a step cache measures by
                block.attn = block.ff = block.ff_context = torch.nn.Identity()
                block.norm1.linear = wrap(block.norm1.linear, block.norm1.linear)
        for place, block in enumerate(model.single_transformer_blocks):
            self._singles.append(MergedFluxSingle(block, steps, wrap))
            model.single_transformer_blocks[place] = torch.nn.Identity()
        self.blocks = self.blocks[:1]
        return [*self._doubles, *self._singles]

    @property
    def fits_kernels(self) -> bool:
        """Whether our kernels can turn its heads: of a power of two."""
        size: int = self.transformer.config.attention_head_dim
        return size & (size - 1) == 0

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

    def run(self, block: Any, streams: Streams) -> Streams:
        text, hidden = block(
            hidden_states=streams.hidden,
            encoder_hidden_states=streams.beside["text"],
            temb=streams.beside["modulation"],
            image_rotary_emb=streams.shared.rotary,
        )
        return replace(streams, hidden=hidden, beside={**streams.beside, "text": text})

    def head(self, streams: Streams) -> Streams:
        return self._run_merged(0, 1, streams) if self._doubles else super().head(streams)

    def body(self, streams: Streams) -> Streams:
        if not self._doubles:
            return super().body(streams)
        return self._run_merged(1, len(self._doubles) + len(self._singles), streams)

    def _run_merged(self, first: int, end: int, streams: Streams) -> Streams:
        hidden, text = streams.hidden, streams.beside["text"]
        cos, sin = streams.shared.halves
        parts = self._modulations[min(first, 1)](silu(streams.beside["modulation"]))
        for double in self._doubles[first:end]:
            own, parts = parts[:, : 12 * self.dim], parts[:, 12 * self.dim :]
            hidden, text = self._steps.run_double(double, hidden, text, own, cos, sin)
        self._steps.settle(text)
        if end > len(self._doubles):
            joined = torch.cat([text, hidden], 1)
            for single in self._singles:
                own, parts = parts[:, : 3 * self.dim], parts[:, 3 * self.dim :]
                joined = single(joined, own, cos, sin)
            text, hidden = joined[:, : text.shape[1]], joined[:, text.shape[1] :]
        return replace(streams, hidden=hidden, beside={**streams.beside, "text": text})

    def finish(self, streams: Streams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.beside["modulation"])
        return unpack_latents(self.transformer.proj_out(hidden).float(), streams.shared.grid)

    def modulate(self, streams: Streams) -> Tensor:
        return self.blocks[0].norm1(streams.hidden, emb=streams.beside["modulation"])[0]

    def _make_layout(self, grid: tuple[int, int], text_tokens: int) -> Layout:
        height, width = grid
        positions = torch.zeros(text_tokens + height * width, 3, device=self.transformer.device)
        picture = positions[text_tokens:].view(height, width, 3)
        picture[..., 1] = torch.arange(height, device=positions.device)[:, None]
        picture[..., 2] = torch.arange(width, device=positions.device)[None, :]
        cos, sin = self.transformer.pos_embed(positions)
        return Layout(grid, (cos, sin), halve_rotary(cos, sin))


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
