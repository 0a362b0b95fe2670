"""Loading models of text: weights from a folder, then the tier and the number format they are served in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM

from polymux.core.batch.tokens import TokenModel
from polymux.core.compute.adapters import AdapterFiles, AdapterSet
from polymux.core.compute.body import Body, TransformersBody
from polymux.core.compute.decoder import TransformersDecoder, read_shape
from polymux.core.compute.fast import accelerate
from polymux.core.compute.fast.body import accelerate_body
from polymux.core.compute.quantization import Quantizer, find_quantization, quantize_model
from polymux.core.compute.weights import Reading
from polymux.core.errors import ConfigError, ModelError
from polymux.core.stopwatch import part

TIERS = ("fast", "reference")


def load_decoder(
    folder: Path,
    device: torch.device,
    dtype: torch.dtype,
    *,
    tier: str = "fast",
    quantization: str | None = None,
    positions: int | None = None,
    quantizers: Sequence[Quantizer] = (),
    adapters: Sequence[AdapterFiles] = (),
    reading: Reading | None = None,
) -> TokenModel:
    """A decoder from a model folder, on the fast tier where its structure allows.

    `quantization` replaces the linear layers by a format of `quantizers` or of core ("int8": weights in 8 bits, on a
    CPU); it needs the fast tier. `adapters` are served beside the model. `reading` is what was begun of the weights.
    Raises `ModelError` when the architecture cannot be served, `ConfigError` for a wrong option.
    """
    check_tier(tier)
    make = find_quantization(quantization, device, quantizers)
    if make is not None and tier != "fast":
        raise ConfigError(f"quantization {quantization!r} needs the fast tier", param="quantization")
    config = AutoConfig.from_pretrained(folder)
    read_shape(config, dtype)
    try:
        with part("weights"):
            model = _read_model(folder, config, dtype, device, reading)
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a language model from {folder}: {error}") from error
    with part("weights"):
        reference = TransformersDecoder(model.to(device))
    served = AdapterSet(reference.model, adapters, dtype) if adapters else None
    if tier != "reference":
        return accelerate(reference, make, positions, served)
    if served is not None:
        reference.adapt(served)
    return reference


def _read_model(
    folder: Path, config: Any, dtype: torch.dtype, device: torch.device, reading: Reading | None
) -> torch.nn.Module:
    # straight to a card, without a copy of all in between
    placed = {"device_map": device} if device.type == "cuda" else {}
    kind = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    if reading is None or not isinstance(kind, type):
        return AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, **placed)
    return kind.from_pretrained(None, config=config, dtype=dtype, state_dict=reading.take(), **placed)


def prepare_body(
    model: torch.nn.Module,
    *,
    tier: str = "fast",
    quantization: str | None = None,
    quantizers: Sequence[Quantizer] = (),
) -> Body:
    """A transformers model without a head, on its device, ready to run; on the fast tier where its structure allows.

    Raises `ModelError` when it does not take our attention, `ConfigError` for a wrong option.
    """
    check_tier(tier)
    device = next(model.parameters()).device
    make = find_quantization(quantization, device, quantizers)
    reference = TransformersBody(model)
    body = reference if tier == "reference" else accelerate_body(reference, make)
    if body is reference:
        quantize_model(model, quantization, device, quantizers)
    return body


def check_tier(tier: str) -> None:
    """Raises `ConfigError` for a tier that is not known."""
    if tier not in TIERS:
        raise ConfigError(f"tier {tier!r} is unknown: use {' or '.join(TIERS)}", param="tier")
