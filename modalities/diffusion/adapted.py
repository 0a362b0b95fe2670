"""Adapters of a denoiser and its text encoders: one for a whole pass, at the speed of a compiled block.

A layer's matrices are attributes of its own, so that the compiler sees tensors of one shape in every block, whichever
adapter is in force, and compiles a block once with and once without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import conv2d, linear

from polymux.core.batch.denoiser import Adapters
from polymux.core.compute.adapters import AdapterFiles, AdapterSet
from polymux.core.compute.adapters.linear import Place
from polymux.core.errors import ModelError
from polymux.modalities.diffusion.lora import Target, open_lora

Changes = tuple[tuple[Tensor, Tensor], ...]


class AdaptedLayer(nn.Module):
    """`base`, a linear layer or a convolution, plus the changes that are in force, if any."""

    def __init__(self, base: nn.Module, pieces: Sequence[tuple[int, Place]]) -> None:
        super().__init__()
        self.base = base
        self.firsts = tuple(first for first, _ in pieces)
        self.places = tuple(place for _, place in pieces)
        self.changes: Changes = ()
        """Per place its two matrices, (rank, in) and (out, rank)."""

    @property
    def weight(self) -> Tensor:
        """Some models ask a layer for its weight's dtype."""
        weight: Tensor = self.base.weight
        return weight

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.base(hidden)
        if not self.changes:
            return out
        if isinstance(self.base, nn.Conv2d):
            ((down, up),) = self.changes
            inner = conv2d(
                hidden,
                down.unflatten(1, self.base.weight.shape[1:]),
                None,
                self.base.stride,
                self.base.padding,
                self.base.dilation,
            )
            return out + conv2d(inner, up[..., None, None])
        for first, (down, up) in zip(self.firsts, self.changes):
            out[..., first : first + up.shape[0]] += linear(linear(hidden, down), up)
        return out


class PassAdapters(AdapterSet, Adapters):
    """Adapters of which one at a time is in force, for all rows of a pass."""

    kinds = (nn.Linear, nn.Conv2d)

    def __init__(self, model: nn.Module, files: Sequence[AdapterFiles], dtype: torch.dtype) -> None:
        """`model` holds all parts that may be changed, by name. Raises `ModelError` for an adapter of another."""
        super().__init__(model, files, dtype)
        self.model = model
        for name in self.places:
            layer = model.get_submodule(name)
            if isinstance(layer, nn.Conv2d) and (layer.groups != 1 or layer.padding_mode != "zeros"):
                raise ModelError(f"adapters of {name}, a convolution by groups, are not supported")
        self._layers: list[AdaptedLayer] = []
        self._now: int | None = None
        self._known: dict[int, list[Changes]] = {}

    def adapt(self, layer: nn.Module, pieces: Sequence[tuple[int, Place]]) -> nn.Module:
        adapted = AdaptedLayer(layer, pieces)
        self._layers.append(adapted)
        return adapted

    @property
    def bound(self) -> bool:
        return self._now is not None

    def bind(self, weights: Tensor | None) -> None:
        wanted = None if weights is None else weights.data_ptr()
        if wanted == self._now:
            return
        self._now = wanted
        if weights is None:
            for layer in self._layers:
                layer.changes = ()
            return
        if wanted not in self._known:  # blocks stay where they are, so their views serve again
            self._known[weights.data_ptr()] = [
                tuple((place.down(weights), place.up(weights)) for place in layer.places) for layer in self._layers
            ]
        for layer, changes in zip(self._layers, self._known[weights.data_ptr()]):
            layer.changes = changes


def load_adapters(
    options: Mapping[str, Any], pipeline: str, parts: Mapping[str, nn.Module], dtype: torch.dtype
) -> PassAdapters | None:
    """The adapters of a model's option `adapters` (name -> folder) and the parts they change. Raises `ModelError`."""
    folders = options.get("adapters") or {}
    if not isinstance(folders, Mapping):
        raise ModelError("adapters is no table of names and folders")
    if not folders:
        return None
    model = nn.ModuleDict(parts)
    layers = frozenset(name for name, layer in model.named_modules() if isinstance(layer, PassAdapters.kinds))
    target = Target(pipeline, layers, model["unet"].config if "unet" in model else None)
    files = [open_lora(name, Path(folder), target) for name, folder in folders.items()]
    return PassAdapters(model, files, dtype)
