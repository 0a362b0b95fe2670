"""The element type a model is asked to compute in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from polymux.core.errors import ConfigError


def read_dtype(options: Mapping[str, Any]) -> torch.dtype:
    """`dtype` of a model's options, float32 when there is none. Raises `ConfigError` for what is no such type."""
    name = options.get("dtype", "float32")
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"dtype {name!r} is not a floating-point type of torch", param="dtype")
    return dtype
