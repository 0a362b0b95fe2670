"""Transformers of the Stable Diffusion 3 kind (diffusers' `SD3Transformer2DModel`) as denoisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import SD3Transformer2DModel
from torch import Tensor

from polymux.core.batch.denoiser import DenoiseBatch, Streams
from polymux.modalities.diffusion.encoders import POOLED, PROMPT
from polymux.modalities.diffusion.transformer import TransformerDenoiser


class StableDiffusion3Denoiser(TransformerDenoiser):
    """Predicts velocities. Picture and text flow through the blocks together; the last block drops the text."""

    def __init__(self, transformer: SD3Transformer2DModel) -> None:
        super().__init__(transformer, transformer.transformer_blocks, transformer.config.patch_size)

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.transformer
        hidden = model.pos_embed(batch.latents.to(self.dtype))
        modulation = model.time_text_embed(batch.timesteps, batch.gather(POOLED).to(self.dtype))
        text = model.context_embedder(batch.gather(PROMPT).to(self.dtype))
        return Streams(hidden, {"text": text, "modulation": modulation}, tuple(batch.latents.shape[-2:]))

    def run(self, block: Any, streams: Streams) -> Streams:
        text, hidden = block(
            hidden_states=streams.hidden,
            encoder_hidden_states=streams.beside["text"],
            temb=streams.beside["modulation"],
        )
        beside = streams.beside if text is None else {**streams.beside, "text": text}
        return replace(streams, hidden=hidden, beside=beside)

    def finish(self, streams: Streams) -> Tensor:
        hidden = self.transformer.norm_out(streams.hidden, streams.beside["modulation"])
        return unpatchify(self.transformer.proj_out(hidden), streams.shared, self.patch).float()

    def modulate(self, streams: Streams) -> Tensor:
        return self.blocks[0].norm1(streams.hidden, emb=streams.beside["modulation"])[0]


def unpatchify(tokens: Tensor, size: tuple[int, int], patch: int) -> Tensor:
    """(P, tokens, patch * patch * channels) -> (P, channels, height, width)."""
    height, width = size[0] // patch, size[1] // patch
    split = tokens.reshape(len(tokens), height, width, patch, patch, -1)
    return torch.einsum("nhwpqc->nchpwq", split).reshape(len(tokens), -1, height * patch, width * patch)
