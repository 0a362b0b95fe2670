"""Models of the public shapes in `shapes.json`, with random weights drawn as transformers itself draws them."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def build_model(shape: dict[str, Any], device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    """One entry of `shapes.json`, made on the device: whatever the model computes of its configuration is as it
    would be for a real one (the scale of Gemma's embeddings is in no checkpoint)."""
    kind = getattr(transformers, shape["class"].removeprefix("transformers."))
    torch.manual_seed(0)
    with torch.device(device):
        model = kind._from_config(kind.config_class(**shape["config"]), dtype=dtype)
    return model.eval().requires_grad_(False)
