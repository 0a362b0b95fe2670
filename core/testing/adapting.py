"""Adapters with random weights as PEFT writes them, and the model that each of them makes, merged by hand."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn

EVERYWHERE = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(
    folder: Path,
    model: nn.Module,
    *,
    rank: int = 4,
    targets: tuple[str, ...] = EVERYWHERE,
    seed: int = 0,
    strength: float = 0.3,
    **settings: Any,
) -> Path:
    """An adapter of `model` for its layers called `targets`; `settings` go into its adapter_config.json."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and name.rpartition(".")[2] in targets:
            key = f"base_model.model.{name}"
            down = torch.randn(rank, layer.in_features, generator=generator) * strength
            tensors[f"{key}.lora_A.weight"] = down
            tensors[f"{key}.lora_B.weight"] = torch.randn(layer.out_features, rank, generator=generator) * strength
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": list(targets), **settings}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def merge_adapter(model: nn.Module, folder: Path, scale: float = 1.0) -> nn.Module:
    """A copy of `model` whose weights are changed by `scale` times the products of the adapter's matrices."""
    merged = copy.deepcopy(model)
    tensors = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for key, down in tensors.items():
            if key.endswith(".lora_A.weight"):
                name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
                up = tensors[key.replace(".lora_A.", ".lora_B.")]
                merged.get_submodule(name).weight += scale * up @ down
    return merged
