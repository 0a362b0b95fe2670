"""Models of the public shapes in `shapes.json`, with random weights drawn as transformers itself draws them."""

from __future__ import annotations

from typing import Any

import torch
import transformers

SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "vocab_size": 320,
    "max_position_embeddings": 1024,
    "query_pre_attn_scalar": 16,
}


def shrink(shape: dict[str, Any]) -> dict[str, Any]:
    """A small decoder of the same structure, to see on a CPU that a script runs."""
    config = {**shape["config"], **{name: size for name, size in SMALL.items() if name in shape["config"]}}
    if "rope_parameters" in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0}
    return {**shape, "config": config}


def build_model(shape: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """One entry of `shapes.json`, made on the device: whatever the model computes of its configuration is as it
    would be for a real one (the scale of Gemma's embeddings is in no checkpoint)."""
    kind = getattr(transformers, shape["class"].removeprefix("transformers."))
    torch.manual_seed(0)
    with torch.device(device):
        model = kind._from_config(kind.config_class(**shape["config"]), dtype=dtype)
    return model.eval().requires_grad_(False)
