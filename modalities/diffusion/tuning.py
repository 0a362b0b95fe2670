"""Bringing a loaded denoiser up to speed, as a model's options say."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

import torch

from polymux.core.batch.denoiser import BlockModel, DenoiseModel, Wrap, keep_layer
from polymux.core.errors import ConfigError
from polymux.modalities.diffusion.flux import FluxDenoiser
from polymux.modalities.diffusion.merged import compile_blocks
from polymux.modalities.diffusion.unet import UNetDenoiser
from polymux.modalities.diffusion.wan import WanDenoiser

OWN = (FluxDenoiser, WanDenoiser, UNetDenoiser)
"""Models between whose products kernels of our own can stand."""


def tune(model: DenoiseModel, device: torch.device, options: Mapping[str, Any], wrap: Wrap = keep_layer) -> None:
    """`kernels`: merge projections, with kernels of our own between the products; by default where the model has such,
    unless `compile` is given. `compile`: merge projections and compile the repeated blocks (the first pass of a shape
    takes seconds); by default for all others. `graphs`: replay whole passes, which keeps the memory of eight; by
    default of UNets alone, whose steps are over a thousand short kernels: the host is slower than the card. All on
    CUDA only, unless asked for.

    Raises `ConfigError`.
    """
    able = device.type == "cuda" and find_spec("triton") is not None
    small = isinstance(model, UNetDenoiser)
    own = isinstance(model, OWN) and model.fits_kernels and (wrap is keep_layer or not small)
    kernels = options.get("kernels", able and own and "compile" not in options)
    compiled = options.get("compile", able and not kernels)
    graphs = options.get("graphs", device.type == "cuda" and small)
    if not all(isinstance(each, bool) for each in (kernels, compiled, graphs)):
        raise ConfigError("kernels, compile and graphs are true or false", param="compile")
    if graphs and device.type != "cuda":
        raise ConfigError("graphs are recorded on CUDA only", param="graphs")
    if kernels and (compiled or not (able and own)):
        raise ConfigError(
            "kernels are for FLUX (heads of a power of two), Wan from text, and UNets without adapters; on CUDA, and "
            "stand in for compile",
            param="kernels",
        )
    if not isinstance(model, BlockModel):
        return
    if kernels and isinstance(model, OWN):
        from polymux.modalities.diffusion.flux_kernels import KernelSteps  # needs triton

        model.merge(wrap, KernelSteps(split=wrap is keep_layer))  # an adapter changes a layer as a whole
    if compiled:
        compile_blocks(model.merge(wrap))
    if graphs:
        model.record()
