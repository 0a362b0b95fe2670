"""What an engine chooses where it is told nothing: launches and cache in proportion to the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from polymux.core.errors import ConfigError

USABLE = 0.92
"""Share of the free device memory that an engine takes; the rest is for other processes and fragmentation."""

WORKING_BYTES = 6 << 30
"""For activations, recorded launches and the libraries' own buffers."""

LEAST_BYTES = 1 << 30

ON_CUDA = {"max_rows": 256, "max_units": 4096, "slice_ms": 30.0}


def choose_settings(device: torch.device, folders: Iterable[Path], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a site on `device` that loads the models in `folders`: what is `given`, and ours for the rest.

    Raises `ConfigError` if the weights leave no room for a cache.
    """
    if device.type != "cuda":
        return dict(given)
    settings = {**ON_CUDA, **given}
    if "cache_bytes" in given:
        return settings
    free, total = torch.cuda.mem_get_info(device)
    sizes = [count_weight_bytes(folder) for folder in folders]
    # while a model is rebuilt from its parts, its weights are there twice
    weights = sum(sizes) + max(sizes, default=0)
    cache = int(free * USABLE) - weights - min(WORKING_BYTES, total // 8)
    if cache < LEAST_BYTES:
        raise ConfigError(
            f"loading the models takes {weights / 2**30:.1f} GiB and {device} has {free / 2**30:.1f} GiB free: no room "
            "is left for a cache; serve fewer models, quantize them, or set cache_bytes of [engine] yourself",
            param="cache_bytes",
        )
    return {**settings, "cache_bytes": cache}


def count_weight_bytes(folder: Path) -> int:
    """Bytes of the weight files in a model's folder and its components' folders."""
    return sum(path.stat().st_size for path in folder.rglob("*.safetensors"))
