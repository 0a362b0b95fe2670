"""A vision-language model of transformers as its two halves: an encoder of pictures, and a decoder.

Recognised by structure: which parts the model has, not what it is called.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polymux.core.compute.decoder import LanguageHalf, TransformersDecoder
from polymux.core.compute.device import Device
from polymux.core.errors import ModelError
from polymux.modalities.vision.patches import PIECE, PatchEncoder
from polymux.modalities.vision.scale import PixelScale
from polymux.modalities.vision.tiles import AnyresEncoder, TileEncoder

Seeing = TileEncoder | PatchEncoder


def split_model(
    model: Any, processor: Mapping[str, Any], device: Device, *, piece: int = PIECE
) -> tuple[Seeing, TransformersDecoder]:
    """The encoder and the decoder of an `...ForConditionalGeneration` whose weights are on the device; it belongs to
    them from now on. `processor` is its preprocessor_config.json. Raises `ModelError` for a structure that is unknown.
    """
    body = model.model
    language = getattr(body, "language_model", None) or getattr(body, "text_model", None)
    if language is None:
        raise ModelError(f"{type(model).__name__} has no language model inside: not supported")
    dtype = next(language.parameters()).dtype
    scale = PixelScale(processor, device, dtype)
    encoder: Seeing
    if hasattr(getattr(body, "visual", None), "blocks"):
        encoder = PatchEncoder(body.visual, scale, device, piece=piece)
    elif hasattr(body, "connector") and hasattr(body, "vision_model"):
        encoder = _split_connected(model, scale, dtype)
    elif hasattr(body, "multi_modal_projector") and hasattr(body, "vision_tower"):
        encoder = _split_projected(model, scale, dtype)
    else:
        raise ModelError(f"{type(model).__name__} sees in a way that is not known here: not supported")
    return encoder, TransformersDecoder(LanguageHalf(language, model.lm_head), encoder.inlay)


def _split_connected(model: Any, scale: PixelScale, dtype: torch.dtype) -> TileEncoder:
    """Idefics3 and SmolVLM: neighbours of a tile's patches are merged by a connector."""
    config, body = model.config, model.model
    vision, connector = (part.eval().requires_grad_(False) for part in (body.vision_model, body.connector))
    side = config.vision_config.image_size
    vectors = (side // config.vision_config.patch_size) ** 2 // config.scale_factor**2

    def see(pixels: Tensor) -> Tensor:
        return connector(vision(pixel_values=pixels).last_hidden_state)

    return TileEncoder(see, scale, side, vectors, config.text_config.hidden_size, dtype)


def _split_projected(model: Any, scale: PixelScale, dtype: torch.dtype) -> TileEncoder:
    """LLaVA: hidden states of some layers are projected; OneVision: those of several tiles are one picture's."""
    config, body = model.config, model.model
    tower, projector = (part.eval().requires_grad_(False) for part in (body.vision_tower, body.multi_modal_projector))
    layers, first = config.vision_feature_layer, int(config.vision_feature_select_strategy == "default")
    vision, dim = config.vision_config, config.text_config.hidden_size
    classes = int(getattr(getattr(tower, "vision_model", tower).embeddings, "class_embedding", None) is not None)
    vectors = (vision.image_size // vision.patch_size) ** 2 + classes - first

    def see(pixels: Tensor) -> Tensor:
        states = tower(pixels, output_hidden_states=True, return_dict=True).hidden_states
        chosen = [layers] if isinstance(layers, int) else layers
        return projector(torch.cat([states[layer][:, first:] for layer in chosen], dim=-1))

    newline = getattr(body, "image_newline", None)
    if newline is None:
        return TileEncoder(see, scale, vision.image_size, vectors, dim, dtype)

    def pack(parts: list[Tensor], sizes: list[tuple[int, int]]) -> list[Tensor]:
        shapes = [list(size) for size in sizes]
        packed, _ = body.pack_image_features(
            parts, shapes, image_newline=newline.detach(), vision_aspect_ratio=config.vision_aspect_ratio
        )
        return list(packed)

    return AnyresEncoder(see, pack, scale, vision.image_size, vectors, dim, dtype)
