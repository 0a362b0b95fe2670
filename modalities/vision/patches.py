"""An encoder of pictures at their own size: patches that attend within their frame (Qwen2.5-VL, Qwen3-VL).

The parts are the model's own; the pass is ours. What depends on a picture's size alone is kept per size, and frames of
one length attend in one call, whatever pictures they are of.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import linear, scaled_dot_product_attention

from polymux.core.batch.encode import Encoder
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.device import Device
from polymux.core.compute.fast.operations import rotate
from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.modalities.vision.scale import PixelScale
from polymux.modalities.vision.work import Item

PIECE = 64
"""Vectors of one block of the content cache."""

SIZES = 24
"""Sizes of pictures whose places are kept."""

WORTH_PLANNING = 64
"""Calls of attention on one shape from which on it gets a plan."""


@dataclass(frozen=True)
class Places:
    """What one frame's size says, for its patches in the order in which they attend."""

    order: np.ndarray | None
    """Where each patch comes from, where that is not its own place."""
    learned: Tensor | None
    """(patches, dim): position embeddings."""
    cos: Tensor
    sin: Tensor
    """(patches, head dim) float32."""
    windows: list[int]
    """Lengths of the stretches that attend among themselves in layers with windows."""


class PatchEncoder(Encoder):
    """`visual` is the model's vision tower; it belongs to the encoder from now on."""

    def __init__(self, visual: Any, scale: PixelScale, device: Device, *, piece: int = PIECE) -> None:
        config = visual.config
        self.visual = visual.eval().requires_grad_(False)
        self.scale = scale
        self.patch: int = config.patch_size
        self.merge: int = config.spatial_merge_size
        self.frames: int = config.temporal_patch_size
        self.heads: int = config.num_heads
        self.full = frozenset(getattr(config, "fullatt_block_indexes", ()))
        """Layers without windows, where others have them."""
        self.window: int = getattr(config, "window_size", 0) // self.merge // self.patch if self.full else 0
        self.deep: list[int] = list(getattr(config, "deepstack_visual_indexes", ()))
        """Layers whose output also goes to the decoder."""
        self.dim: int = config.out_hidden_size
        self._device = device
        self._weight = visual.patch_embed.proj.weight.flatten(1)
        self._bias = visual.patch_embed.proj.bias
        self._dtype = self._weight.dtype
        self.inlay = CacheSpec("patches", (piece, config.out_hidden_size * (1 + len(self.deep))), self._dtype, 1)
        self._places = lru_cache(SIZES)(self._place)
        self._shapes: Counter[torch.Size] = Counter()
        self._rotate = choose_turn(device.torch)

    def count(self, item: Item) -> int:
        frames, height, width, _ = item.pixels.shape
        return -(-frames // self.frames) * (height // self.patch) * (width // self.patch) // self.merge**2

    def check(self, item: Item) -> None:
        """Raises `InvalidRequest` for what the encoder does not take."""
        unit = self.patch * self.merge
        shape = item.pixels.shape
        if len(shape) != 4 or shape[3] != 3 or min(shape) < 1 or shape[1] % unit or shape[2] % unit:
            raise InvalidRequest(f"pixels of shape {shape} are not (frames, height, width, 3) in units of {unit}")
        if shape[0] > 1 and shape[0] % self.frames:
            raise InvalidRequest(f"a clip has a multiple of {self.frames} frames, not {shape[0]}")

    def forward(self, items: list[Item]) -> list[Tensor | PolymuxError]:
        patches, places = [], []
        for item in items:
            cut = self._cut(self.scale.apply(item.pixels))
            place = self._places(*(side // self.patch for side in item.pixels.shape[1:3]))
            if place.order is not None:
                cut = cut[:, torch.from_numpy(place.order).to(cut.device)]
            patches.append(cut.flatten(0, 1))
            places += [place] * cut.shape[0]
        x = linear(torch.cat(patches), self._weight, self._bias)
        if places[0].learned is not None:
            x = x + torch.cat([place.learned for place in places if place.learned is not None])
        turns = torch.cat([place.cos for place in places]), torch.cat([place.sin for place in places])
        lengths = [len(place.cos) for place in places]
        whole = self._group(lengths)
        windows = self._group([length for place in places for length in place.windows]) if self.window else whole
        deep = []
        for index, block in enumerate(self.visual.blocks):
            groups = whole if not self.window or index in self.full else windows
            x = x + self._attend(block.attn, block.norm1(x), turns, groups)
            x = x + block.mlp(block.norm2(x))
            if index in self.deep:
                deep.append(self.visual.deepstack_merger_list[self.deep.index(index)](x))
        vectors = torch.cat([self.visual.merger(x), *deep], dim=1)
        return self._restore(vectors, items, places)

    def _cut(self, pixels: Tensor) -> Tensor:
        """(frames, height, width, 3) to (steps, patches, 3 * frames * patch * patch), patches in blocks that merge. A
        single frame stands for all of its step."""
        frames, height, width, channels = pixels.shape
        if frames == 1:
            pixels = pixels.expand(self.frames, -1, -1, -1)
        patch, merge = self.patch, self.merge
        blocks = pixels.reshape(
            -1, self.frames, height // patch // merge, merge, patch, width // patch // merge, merge, patch, channels
        )
        return blocks.permute(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(
            blocks.shape[0], height // patch * (width // patch), channels * self.frames * patch * patch
        )

    def _attend(self, attention: Any, x: Tensor, turns: tuple[Tensor, Tensor], groups: list[Tensor | int]) -> Tensor:
        """Attention of patches (T, dim) in groups of stretches."""
        merged = attention.qkv(x).view(len(x), 3, self.heads, -1)
        self._rotate(merged, *turns)
        out = torch.empty_like(merged[:, 2])
        for group in groups:
            parts = [self._stretch(part, group) for part in merged.unbind(dim=1)]
            with self._choose(parts[0].shape):
                found = scaled_dot_product_attention(*parts, scale=attention.scaling).transpose(1, 2)
            if isinstance(group, int):
                out = found.reshape(out.shape)
            else:
                out[group] = found
        return attention.proj(out.flatten(1))

    def _choose(self, shape: torch.Size) -> AbstractContextManager[None]:
        """cuDNN's attention is the fastest but makes a plan for every new shape, which takes longer than it saves: only
        a shape that keeps coming gets one."""
        if self._device.torch.type != "cuda" or self._shapes[shape] > WORTH_PLANNING:
            return nullcontext()
        self._shapes[shape] += 1
        return sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])

    @staticmethod
    def _stretch(part: Tensor, group: Tensor | int) -> Tensor:
        """(T, heads, dim) to (stretches, heads, length, dim)."""
        stretches = part.view(-1, group, *part.shape[1:]) if isinstance(group, int) else part[group]
        return stretches.transpose(1, 2)

    def _group(self, lengths: list[int]) -> list[Tensor | int]:
        """Stretches by length: their places, (stretches, length); or the length alone where all have one."""
        if len(set(lengths)) == 1:
            return [lengths[0]]
        starts = np.cumsum([0, *lengths[:-1]])
        groups = {
            str(length): np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths) if n == length])
            for length in sorted(set(lengths))
        }
        return [places.view(-1, int(length)) for length, places in self._device.upload(groups).items()]

    def _restore(self, vectors: Tensor, items: list[Item], places: list[Places]) -> list[Tensor | PolymuxError]:
        """Per item its vectors, in the order of the picture."""
        steps = [max(1, len(item.pixels) // self.frames) for item in items]
        found: list[Tensor | PolymuxError] = []
        first = 0
        parts = vectors.split([self.count(item) for item in items])
        for part, count in zip(parts, steps):
            order = places[first].order
            if order is not None:
                units = order[:: self.merge**2] // self.merge**2
                back = torch.from_numpy(np.argsort(units)).to(part.device)
                part = part.view(count, -1, part.shape[1])[:, back].flatten(0, 1)
            found.append(part)
            first += count
        return found

    def _place(self, height: int, width: int) -> Places:
        """Of one frame of `height` by `width` patches."""
        merge = self.merge
        grid = np.indices((height, width)).reshape(2, height // merge, merge, width // merge, merge)
        rows, columns = grid.transpose(0, 1, 3, 2, 4).reshape(2, -1)
        order, windows = self._window(height // merge, width // merge) if self.window else (None, [])
        if order is not None:
            rows, columns = rows[order], columns[order]
        learned = self._embed(rows, columns, height, width)
        cos, sin = self._turn(rows, columns)
        return Places(order, learned, cos, sin, windows)

    def _turn(self, rows: np.ndarray, columns: np.ndarray) -> tuple[Tensor, Tensor]:
        """Axial rotary embedding: half of each head turns by the row, half by the column."""
        device = self._device.torch
        rotary = self.visual.rotary_pos_emb
        frequencies = rotary.inv_freq.to(device, torch.float32)
        places = torch.from_numpy(np.stack([rows, columns], axis=1)).to(device, torch.float32)
        angles = (places[:, :, None] * frequencies).flatten(1).repeat(1, 2)
        return angles.cos(), angles.sin()

    def _embed(self, rows: np.ndarray, columns: np.ndarray, height: int, width: int) -> Tensor | None:
        """Learned embeddings of a square grid, between whose places is interpolated; corners meet corners."""
        table = getattr(self.visual, "pos_embed", None)
        if table is None:
            return None
        side = int(table.weight.shape[0] ** 0.5)
        taps = [_find_taps(places, size, side) for places, size in ((rows, height), (columns, width))]
        indices = np.stack([low * side + right for low in taps[0][0] for right in taps[1][0]])
        weights = np.stack([high * right for high in taps[0][1] for right in taps[1][1]])
        device = table.weight.device
        chosen = table.weight[torch.from_numpy(indices).to(device)]
        return (chosen * torch.from_numpy(weights).to(device, chosen.dtype)[..., None]).sum(dim=0)

    def _window(self, height: int, width: int) -> tuple[np.ndarray, list[int]]:
        """Patches window by window, and how many each window has; windows at the edges are smaller."""
        side, units = self.window, np.arange(height * width).reshape(height, width)
        edges = [[*range(0, size, side), size] for size in (height, width)]
        windows = [
            units[top:low, left:right].ravel() for top, low in pairwise(edges[0]) for left, right in pairwise(edges[1])
        ]
        merged = np.concatenate(windows)
        order = (merged[:, None] * self.merge**2 + np.arange(self.merge**2)).ravel()
        return order, [len(window) * self.merge**2 for window in windows]


def choose_turn(device: torch.device) -> Callable[[Tensor, Tensor, Tensor], None]:
    """What rotates the queries and keys of (T, 3, heads, dim) in place by (T, dim) cosines and sines: a fused kernel
    where the device has one."""
    if device.type == "cuda" and find_spec("triton") is not None:
        from polymux.core.compute.triton.turn import turn

        return turn
    return turn_plainly


def turn_plainly(merged: Tensor, cosines: Tensor, sines: Tensor) -> None:
    turned = rotate(merged[:, :2].float(), cosines[:, None, None], sines[:, None, None])
    merged[:, :2] = turned.to(merged.dtype)


def _find_taps(places: np.ndarray, size: int, side: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The two places of a table of `side` between which each of `size` places lies, and their weights."""
    at = places.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(at).astype(np.int64)
    part = at - low
    return [low, np.minimum(low + 1, side - 1)], [1 - part, part]
