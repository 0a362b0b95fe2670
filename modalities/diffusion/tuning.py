"""Bringing a loaded denoiser up to speed, as a model's options say."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from polymux.core.batch.denoiser import BlockModel, DenoiseModel
from polymux.core.errors import ConfigError
from polymux.modalities.diffusion.merged import compile_blocks


def tune(model: DenoiseModel, device: torch.device, options: Mapping[str, Any]) -> None:
    """`compile`: merge projections and compile the repeated blocks (the first pass of a shape takes seconds); by
    default on CUDA only. `graphs`: replay whole passes, on CUDA only; off by default, as it keeps their memory.

    Raises `ConfigError`.
    """
    compiled, graphs = (
        options.get("compile", device.type == "cuda" and find_spec("triton") is not None),
        options.get("graphs", False),
    )
    if not isinstance(compiled, bool) or not isinstance(graphs, bool):
        raise ConfigError("compile and graphs are true or false", param="compile")
    if graphs and device.type != "cuda":
        raise ConfigError("graphs are recorded on CUDA only", param="graphs")
    if not isinstance(model, BlockModel):
        return
    if compiled:
        compile_blocks(model.merge())
    if graphs:
        model.record()
