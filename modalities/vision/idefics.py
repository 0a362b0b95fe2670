"""Idefics3 and SmolVLM through transformers: the encoder of picture tiles, and the decoder whose prompts hold them."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from polymux.core.batch.oneshot import OneShotModel
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.decoder import TransformersDecoder


class TileEncoder(OneShotModel):
    """Tiles, (channels, size, size) float32 each and normalised, become `vectors` vectors of the decoder's width."""

    def __init__(self, model: Any) -> None:
        """`model` is an `...ForConditionalGeneration` of the family."""
        config = model.config
        self.vision = model.model.vision_model.eval().requires_grad_(False)
        self.connector = model.model.connector.eval().requires_grad_(False)
        self.size: int = config.vision_config.image_size
        self.channels: int = config.vision_config.num_channels
        self.vectors: int = (self.size // config.vision_config.patch_size) ** 2 // config.scale_factor**2
        parameter = next(self.connector.parameters())
        self._device, self._dtype = parameter.device, parameter.dtype
        self.slab = CacheSpec("tiles", (self.vectors, config.text_config.hidden_size), self._dtype, 1)

    def forward(self, items: list[np.ndarray], slabs: list[Tensor]) -> list[Any]:
        pixels = torch.from_numpy(np.stack(items)).to(self._device, self._dtype)
        for slab, vectors in zip(slabs, self.connector(self.vision(pixel_values=pixels).last_hidden_state)):
            slab.copy_(vectors)
        return [None] * len(items)


def split_idefics(model: Any) -> tuple[TileEncoder, TransformersDecoder]:
    """The encoder and the decoder of one model; it belongs to them from now on."""
    encoder = TileEncoder(model)
    with torch.device("meta"):
        language = AutoModelForCausalLM.from_config(model.config.text_config)
    language.model = model.model.text_model
    language.lm_head = model.lm_head
    decoder = TransformersDecoder(language)
    decoder.inlay = encoder.slab
    return encoder, decoder
