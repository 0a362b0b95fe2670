"""What stands before and behind a denoiser: text encoders and the decoder of latents, one pass each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from diffusers import AutoencoderKL
from torch import Tensor
from transformers import CLIPTextModel, T5EncoderModel

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.errors import InternalError
from polymux.modalities.diffusion.flux import POOLED, PROMPT
from polymux.modalities.diffusion.work import Prompt


class TextEncoders(OneShotModel):
    """`Prompt` to the conditions of a FLUX transformer: (tokens, joint dim) and (pooled dim,)."""

    def __init__(self, pooled: CLIPTextModel, tokens: T5EncoderModel) -> None:
        self.pooled: Any = pooled
        self.tokens: Any = tokens

    def forward(self, items: list[Prompt], slabs: list[Tensor]) -> list[dict[str, Tensor]]:
        pooled = self.pooled(torch.tensor([item.pooled for item in items], device=self.pooled.device)).pooler_output
        tokens = self.tokens(torch.tensor([item.tokens for item in items], device=self.tokens.device))[0]
        return [{PROMPT: text, POOLED: whole} for text, whole in zip(tokens, pooled)]


class LatentDecoder(OneShotModel):
    """A latent, (channels, height, width) float32, to pixels, (8 height, 8 width, 3) uint8 for a VAE of four levels."""

    def __init__(self, vae: AutoencoderKL) -> None:
        self.vae: Any = vae
        self._exact: Any = None

    def forward(self, items: list[Tensor], slabs: list[Tensor]) -> list[Any]:
        return [self._decode(item) for item in items]

    def _decode(self, latent: Tensor) -> Tensor | InternalError:
        """A VAE in half precision may overflow: what is not finite is decoded again in float32, and never shown."""
        picture = run_decoder(self.vae, latent)
        if not picture.isfinite().all() and self.vae.dtype != torch.float32:
            if self._exact is None:
                self._exact = copy.deepcopy(self.vae).float()
            picture = run_decoder(self._exact, latent)
        if not picture.isfinite().all():
            return InternalError("the picture's decoder gave values that are not finite")
        return (picture * 255).round().to(torch.uint8).permute(1, 2, 0).contiguous()


def run_decoder(vae: Any, latent: Tensor) -> Tensor:
    """(3, height, width) float32, from 0 to 1."""
    scaled = latent / vae.config.scaling_factor + (vae.config.shift_factor or 0.0)
    picture: Tensor = vae.decode(scaled[None].to(vae.dtype), return_dict=False)[0][0].float()
    return (picture / 2 + 0.5).clamp(0, 1)
