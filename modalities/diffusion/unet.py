"""UNets of the Stable Diffusion 1.5, 2 and XL kind (diffusers' `UNet2DConditionModel`) as denoisers."""

from __future__ import annotations

from typing import Any

from diffusers import UNet2DConditionModel
from torch import Tensor

from polymux.core.batch.denoiser import DenoiseBatch, DenoiseModel

PROMPT = "prompt"
"""Condition: the text encoder's token embeddings, (text tokens, cross-attention dim)."""

POOLED = "pooled"
"""Condition of the XL kind: the pooled text embedding, (pooled dim,)."""

SIZES = "sizes"
"""Condition of the XL kind: original size, crop and target size, (6,)."""


class UNetDenoiser(DenoiseModel):
    """Predicts what its scheduler is configured for (noise, or velocity). Every row has a timestep of its own."""

    def __init__(self, unet: UNet2DConditionModel) -> None:
        self.unet: Any = unet
        self.unet.eval().requires_grad_(False)
        self.dtype = self.unet.dtype
        self._extended = self.unet.config.addition_embed_type == "text_time"

    def forward(self, batch: DenoiseBatch) -> Tensor:
        added = None
        if self._extended:
            added = {"text_embeds": batch.gather(POOLED).to(self.dtype), "time_ids": batch.gather(SIZES).to(self.dtype)}
        prediction: Tensor = self.unet(
            batch.latents.to(self.dtype),
            batch.timesteps,
            encoder_hidden_states=batch.gather(PROMPT).to(self.dtype),
            added_cond_kwargs=added,
            return_dict=False,
        )[0]
        return prediction.float()
