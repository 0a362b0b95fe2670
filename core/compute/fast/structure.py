"""Reading a transformers decoder's structure: which modules play which part in each layer.

A decoder qualifies when every layer is (norm, attention with q, k, v, o projections, norm, gated MLP), with or
without norms on queries and keys and on the outputs of attention and MLP. Everything else is `Unfamiliar`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


class Unfamiliar(Exception):
    """The model's structure is not one the fast tier knows; the message says what is different."""


@dataclass
class Norm:
    """RMS normalisation: x / rms(x) * weight, whatever the module stores."""

    weight: Tensor
    eps: float


@dataclass
class LayerParts:
    """The parts of one decoder layer. Norms on outputs come before the residual is added (Gemma 2 and later)."""

    input_norm: Norm
    q: nn.Linear
    k: nn.Linear
    v: nn.Linear
    o: nn.Linear
    q_norm: Norm | None
    k_norm: Norm | None
    attention_out_norm: Norm | None
    mlp_norm: Norm
    mlp: nn.Module
    mlp_out_norm: Norm | None
    kind: str | None
    """The layer's kind where the model has several with rotary tables of their own."""


def read_layers(model: nn.Module) -> list[LayerParts]:
    """The layers of a decoder, with a head or without. Raises `Unfamiliar`."""
    layers = getattr(find_backbone(model), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise Unfamiliar("it has no list of layers")
    return [_read_layer(layer, index, model.config) for index, layer in enumerate(layers)]


def find_backbone(model: nn.Module) -> nn.Module:
    """What a head stands on; a model without one is its own."""
    backbone = getattr(model, getattr(model, "base_model_prefix", ""), model)
    if not isinstance(backbone, nn.Module):
        raise Unfamiliar("it has no decoder under its base_model_prefix")
    for part in ("embed_tokens", "norm", "rotary_emb"):
        if not isinstance(getattr(backbone, part, None), nn.Module):
            raise Unfamiliar(f"its decoder has no {part}")
    return backbone


def read_norm(module: Any) -> Norm:
    """The weight that makes x / rms(x) * weight equal to the module, found by trying it."""
    weight = getattr(module, "weight", None)
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if not isinstance(weight, Tensor) or eps is None:
        raise Unfamiliar(f"{type(module).__name__} is no RMS norm")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, weight.shape[0], generator=generator).to(weight)
    expected = module(x).float()
    for candidate in (weight.detach(), 1.0 + weight.detach().float()):
        found = torch.nn.functional.rms_norm(x.float(), weight.shape, candidate.float(), eps)
        if torch.allclose(found, expected, rtol=2e-2, atol=2e-2 * expected.abs().max().item()):
            return Norm(candidate, eps)
    raise Unfamiliar(f"{type(module).__name__} is no RMS norm")


def _read_layer(layer: nn.Module, index: int, config: Any) -> LayerParts:
    attention, mlp = getattr(layer, "self_attn", None), getattr(layer, "mlp", None)
    if not isinstance(attention, nn.Module) or not isinstance(mlp, nn.Module):
        raise Unfamiliar("a layer is not attention and MLP")
    projections = {name: getattr(attention, f"{name}_proj", None) for name in "qkvo"}
    if not all(isinstance(projection, nn.Linear) for projection in projections.values()):
        raise Unfamiliar("attention has no q, k, v and o projections")
    after = getattr(layer, "post_attention_layernorm", None)
    before_mlp = getattr(layer, "pre_feedforward_layernorm", None)
    sandwiched = before_mlp is not None
    kinds = getattr(config, "layer_types", None)
    return LayerParts(
        input_norm=read_norm(getattr(layer, "input_layernorm", None)),
        **projections,
        q_norm=_optional(attention, "q_norm"),
        k_norm=_optional(attention, "k_norm"),
        attention_out_norm=read_norm(after) if sandwiched else None,
        mlp_norm=read_norm(before_mlp if sandwiched else after),
        mlp=mlp,
        mlp_out_norm=_optional(layer, "post_feedforward_layernorm"),
        kind=kinds[index] if kinds else None,
    )


def _optional(module: nn.Module, name: str) -> Norm | None:
    found = getattr(module, name, None)
    return None if found is None else read_norm(found)
