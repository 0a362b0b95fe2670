"""Transformers of the PixArt kind (diffusers' `PixArtTransformer2DModel`) as denoisers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from diffusers import PixArtTransformer2DModel
from torch import Tensor

from polymux.core.batch.denoiser import DenoiseBatch, Streams
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.modalities.diffusion.encoders import MASK, PROMPT
from polymux.modalities.diffusion.sd3 import unpatchify
from polymux.modalities.diffusion.transformer import TransformerDenoiser

MASKED = -10_000.0
"""What diffusers adds to the score of a padded token."""


class PixArtDenoiser(TransformerDenoiser):
    """Predicts noise; the variance that the model learned beside it is left out, as no scheduler here reads it."""

    def __init__(self, transformer: PixArtTransformer2DModel, scale: int = 8) -> None:
        """`scale`: pixels along the side of one latent pixel."""
        super().__init__(transformer, transformer.transformer_blocks, transformer.config.patch_size)
        self._scale = scale

    def size(self, request: DenoiseRequest) -> int:
        return self.tokens(request)  # the text is only looked at

    def embed(self, batch: DenoiseBatch) -> Streams:
        model = self.transformer
        rows, _, height, width = batch.latents.shape
        hidden = model.pos_embed(batch.latents.to(self.dtype))
        time, embedded = model.adaln_single(
            batch.timesteps, self._sizes(rows, height, width), batch_size=rows, hidden_dtype=hidden.dtype
        )
        text = batch.gather(PROMPT).to(self.dtype)
        if model.caption_projection is not None:
            text = model.caption_projection(text)
        bias = ((1 - batch.gather(MASK).to(hidden.dtype)) * MASKED)[:, None]
        beside = {"text": text, "bias": bias, "time": time, "embedded": embedded}
        return Streams(hidden, beside, (height, width))

    def _sizes(self, rows: int, height: int, width: int) -> dict[str, Tensor | None]:
        """The largest models also read how large the picture is to be, in pixels."""
        if not self.transformer.use_additional_conditions:
            return {"resolution": None, "aspect_ratio": None}
        device = self.transformer.device
        # filled on the device: an upload would wait for it
        resolution = torch.empty(rows, 2, dtype=self.dtype, device=device)
        resolution[:, 0], resolution[:, 1] = height * self._scale, width * self._scale
        return {"resolution": resolution, "aspect_ratio": resolution.new_full((rows, 1), height / width)}

    def run(self, block: Any, streams: Streams) -> Streams:
        hidden = block(
            streams.hidden,
            encoder_hidden_states=streams.beside["text"],
            encoder_attention_mask=streams.beside["bias"],
            timestep=streams.beside["time"],
        )
        return replace(streams, hidden=hidden)

    def finish(self, streams: Streams) -> Tensor:
        model = self.transformer
        table = model.scale_shift_table[None] + streams.beside["embedded"][:, None]
        shift, scale = table.chunk(2, dim=1)
        hidden = model.norm_out(streams.hidden) * (1 + scale) + shift
        return unpatchify(model.proj_out(hidden), streams.shared, self.patch)[:, : model.config.in_channels].float()

    def modulate(self, streams: Streams) -> Tensor:
        block = self.blocks[0]
        time = streams.beside["time"].reshape(len(streams.hidden), 6, -1)
        shift, scale = (block.scale_shift_table[None] + time)[:, :2].chunk(2, dim=1)
        return block.norm1(streams.hidden) * (1 + scale) + shift
