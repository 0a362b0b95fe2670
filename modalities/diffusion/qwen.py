"""Transformers of the Qwen-Image kind (diffusers' `QwenImageTransformer2DModel`) as denoisers.

Texts of different lengths share a pass within a class of lengths: the shorter are padded, and masked.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from torch.nn.functional import pad

from polymux.core.batch.denoiser import DenoiseBatch, Streams
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.modalities.diffusion.encoders import PROMPT
from polymux.modalities.diffusion.flux import pack_latents, unpack_latents
from polymux.modalities.diffusion.transformer import TransformerDenoiser

CLASS = 64
"""Tokens by which text lengths are told apart: nobody pads more than that."""


@dataclass(frozen=True)
class Layout:
    """What the rows of a pass share."""

    grid: tuple[int, int]
    rotary: tuple[Tensor, Tensor]


class QwenDenoiser(TransformerDenoiser):
    """Predicts velocities. A latent is (channels, height, width); two by two of its pixels make one token."""

    def __init__(self, transformer: QwenImageTransformer2DModel) -> None:
        super().__init__(transformer, transformer.transformer_blocks, 2)

    def group(self, row: DenoiseRow) -> Hashable:
        return row.request.shape, *(-(-length // CLASS) for length in _lengths(row.request))

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.transformer
        lengths = [condition[PROMPT].shape[0] for condition in batch.conditions]
        longest = max(lengths)
        text = torch.stack(
            [pad(each[PROMPT].to(self.dtype), (0, 0, 0, longest - each[PROMPT].shape[0])) for each in batch.conditions]
        )
        hidden = model.img_in(pack_latents(batch.latents.to(self.dtype)))
        time = batch.timesteps.to(self.dtype) / 1000
        beside = {
            "text": model.txt_in(model.txt_norm(text)),
            "modulation": model.time_text_embed(time, hidden),
        }
        if min(lengths) < longest:
            places = torch.arange(longest, device=hidden.device)
            beside["mask"] = torch.stack([places < length for length in lengths])
        grid = (batch.latents.shape[-2] // 2, batch.latents.shape[-1] // 2)
        rotary = model.pos_embed([[(1, *grid)]], max_txt_seq_len=longest, device=hidden.device)
        return Streams(hidden, beside, Layout(grid, rotary))

    def run(self, block: Any, streams: Streams) -> Streams:
        text, hidden = block(
            hidden_states=streams.hidden,
            encoder_hidden_states=streams.beside["text"],
            encoder_hidden_states_mask=streams.beside.get("mask"),
            temb=streams.beside["modulation"],
            image_rotary_emb=streams.shared.rotary,
        )
        return replace(streams, hidden=hidden, beside={**streams.beside, "text": text})

    def finish(self, streams: Streams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.beside["modulation"])
        return unpack_latents(self.transformer.proj_out(hidden).float(), streams.shared.grid)

    def modulate(self, streams: Streams) -> Tensor:
        block = self.blocks[0]
        shift, scale, _ = block.img_mod(streams.beside["modulation"]).chunk(2, -1)[0].chunk(3, -1)
        return block.img_norm1(streams.hidden) * (1 + scale[:, None]) + shift[:, None]

    def combine(self, request: DenoiseRequest, predictions: Tensor) -> Tensor:
        """Classifier-free guidance that keeps the length which every token's prediction has with the prompt."""
        combined = super().combine(request, predictions)
        if len(predictions) == 1:
            return combined
        grid = (combined.shape[-2] // 2, combined.shape[-1] // 2)
        tokens = pack_latents(combined)
        wanted = pack_latents(predictions[:1]).norm(dim=-1, keepdim=True)
        return unpack_latents(tokens * (wanted / tokens.norm(dim=-1, keepdim=True)), grid)


def _lengths(request: DenoiseRequest) -> list[int]:
    return [condition[PROMPT].shape[0] for condition in request.conditions]
