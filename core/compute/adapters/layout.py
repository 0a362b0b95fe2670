"""The adapters of one decoder: every adapter gets a block of the arena with a place for each of its matrices.

All blocks of a decoder have one layout, wide enough for the largest adapter; what an adapter does not have is zero.
So adapters are a cache class like keys and values: they come when a row asks for them, stay while there is room, and
the one that was idle for longest makes room for whatever needs it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import torch
from torch import Tensor, nn

from polymux.core.batch.decoder import AdaptedTokens
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.adapters.files import AdapterFiles
from polymux.core.compute.adapters.linear import AdaptedLinear, Place
from polymux.core.errors import ModelError


@dataclass
class AdaptedLaunch:
    """Which tokens of the launch under way have an adapter. Every adapted layer of a decoder looks here."""

    tokens: Sequence[AdaptedTokens] = ()


class AdapterSet:
    """`files` for `model`. Raises `ModelError` for an adapter of another model."""

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)
    """Layers that adapters may change."""

    def __init__(self, model: nn.Module, files: Sequence[AdapterFiles], dtype: torch.dtype) -> None:
        self.by_name = {each.name: each for each in files}
        self.launch = AdaptedLaunch()
        layers = {name: module for name, module in model.named_modules() if isinstance(module, self.kinds)}
        find_head = getattr(model, "get_output_embeddings", None)
        head = None if find_head is None else find_head()
        ranks: dict[str, int] = {}
        for adapter in files:
            for name, pair in adapter.pairs.items():
                layer = layers.get(name)
                if layer is None or layer is head:
                    raise ModelError(f"adapter {adapter.name} changes {name}, which is no linear layer of the model")
                outputs, inputs = measure(layer)
                if (pair.outputs, pair.inputs) != (outputs, inputs):
                    raise ModelError(
                        f"adapter {adapter.name} is of another model: its {name} is {pair.outputs} by {pair.inputs}, "
                        f"the model's {outputs} by {inputs}"
                    )
                ranks[name] = max(ranks.get(name, 0), pair.rank)
        self.places: dict[str, Place] = {}
        end = 0
        for name, rank in ranks.items():
            outputs, inputs = measure(layers[name])
            place = Place(end, rank, inputs, outputs)
            self.places[name] = place
            end = place.end
        self.spec = CacheSpec("adapters", (end,), dtype, 1)
        self.unwrapped = set(self.places)
        """Layers that no adapted layer stands for yet."""
        self._names = {layers[name]: name for name in self.places}

    def wrap(self, layer: nn.Module, *parts: nn.Module) -> nn.Module:
        """`layer` computes the outputs of `parts`, linear layers of the model, side by side; it shall add their
        adapters'. Itself where no adapter changes any of them."""
        pieces: list[tuple[int, Place]] = []
        first = 0
        for part in parts:
            if part in self._names:
                pieces.append((first, self.places[self._names[part]]))
                self.unwrapped.discard(self._names[part])
            first += measure(part)[0]
        return self.adapt(layer, pieces) if pieces else layer

    def adapt(self, layer: nn.Module, pieces: Sequence[tuple[int, Place]]) -> nn.Module:
        """`layer` with adapters: those of each place change its outputs from there on."""
        return AdaptedLinear(layer, pieces, self.launch)

    def replace(self, model: nn.Module) -> None:
        """Wrap every layer of the model itself that an adapter changes and that nothing stands for yet."""
        for name in sorted(self.unwrapped):
            parent, _, attribute = name.rpartition(".")
            layer = model.get_submodule(name)
            setattr(model.get_submodule(parent), attribute, self.wrap(layer, layer))

    def write(self, name: str, block: Tensor) -> None:
        """Read an adapter from its file into its block, (size,) on the device."""
        block.zero_()
        for module, (down, up) in self.by_name[name].read().items():
            place = self.places[module]
            place.down(block)[: down.shape[0]] = down.to(block)
            place.up(block)[:, : up.shape[1]] = up.to(block)


def measure(layer: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a layer as a matrix: a convolution's inputs are those of all places of its kernel."""
    if isinstance(layer, nn.Conv2d):
        return layer.out_channels, layer.in_channels * prod(layer.kernel_size)
    if isinstance(layer, nn.Linear):
        return layer.out_features, layer.in_features
    raise TypeError(f"a {type(layer).__name__} is no matrix")
