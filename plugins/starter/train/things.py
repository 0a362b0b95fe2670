"""Finds the things in a picture by what can be measured in it; no model is asked.

What differs from the ground is split into connected parts. A part's colour is that of its core; its kind is the one
whose outline, drawn where the part is and as large, overlaps it best.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from outlines import FIELD_CELLS, FIELD_REACH, draw_fields
from scenes import COLOURS, KINDS, SHAPES
from torch import Tensor
from torch.nn.functional import grid_sample, max_pool2d

APART = 0.15
"""How far a pixel's colour must be from the ground's to belong to a thing."""
SPECK = 12
"""Pixels of 64x64 below which a part is no thing."""
STRETCHES = (0.88, 0.94, 1.0, 1.06, 1.12)
"""Of the radius that a part's area tells."""


@dataclass(frozen=True)
class Seen:
    """One thing. Coordinates run from -1 to 1, y downwards; `radius` as in `pictures`; `alike`: overlap of 1."""

    kind: str
    colour: str
    x: float
    y: float
    radius: float
    alike: float


def see(picture: np.ndarray, kinds: tuple[str, ...] = SHAPES, *, whole: bool = False) -> list[Seen]:
    """The things in a picture, (side, side, 3) uint8, largest first. `whole`: all that is there is one thing."""
    pixels = torch.tensor(picture).float() / 255
    ground = find_ground(pixels)
    mask = (pixels - ground).abs().amax(-1) > APART
    least = SPECK * (len(pixels) / 64) ** 2
    found = [mask] if whole else split(mask)
    seen = [describe(pixels, ground, part, kinds) for part in found if int(part.sum()) >= least]
    return sorted(seen, key=lambda thing: -thing.radius)


def find_ground(pixels: Tensor) -> Tensor:
    """(3,): the middle colour along the picture's edge."""
    edge = torch.cat([pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]])
    return edge.median(0).values


def split(mask: Tensor) -> list[Tensor]:
    """The connected parts of (side, side) bool; corners do not connect."""
    names = (torch.arange(mask.numel()).view(mask.shape) + 1.0) * mask
    while True:
        across = max_pool2d(names[None], (1, 3), 1, (0, 1))
        down = max_pool2d(names[None], (3, 1), 1, (1, 0))
        wider = torch.maximum(across, down)[0] * mask
        if torch.equal(wider, names):
            return [names == name for name in names.unique() if name > 0]
        names = wider


def describe(pixels: Tensor, ground: Tensor, part: Tensor, kinds: tuple[str, ...]) -> Seen:
    inside = pixels[part]
    away = (inside - ground).norm(dim=-1)
    colour = inside[away >= 0.8 * away.quantile(0.9)].median(0).values
    cover = measure_cover(pixels, ground, colour) * max_pool2d(part[None].float(), 3, 1, 1)[0]
    kind, x, y, radius, alike = match(cover, kinds)
    palette = torch.tensor(list(COLOURS.values())) / 255
    name = list(COLOURS)[int((palette - colour).norm(dim=-1).argmin())]
    return Seen(kind, name, x, y, radius, alike)


def measure_cover(pixels: Tensor, ground: Tensor, colour: Tensor) -> Tensor:
    """(side, side): how much of each pixel has the colour, from 0 to 1."""
    way = colour - ground
    return (((pixels - ground) @ way) / way.square().sum().clamp(min=1e-4)).clamp(0, 1)


def match(cover: Tensor, kinds: tuple[str, ...]) -> tuple[str, float, float, float, float]:
    """Kind, x, y, radius and overlap of the outline that overlaps best."""
    fields, areas, middles = measure_kinds()
    places = [KINDS.index(kind) for kind in kinds]
    area, x, y = measure(cover)
    best = ("", x, y, 0.0, -1.0)
    for stretch in STRETCHES:
        radius = (area / areas[places]).sqrt() * stretch
        left, top = x - middles[places, 0] * radius, y - middles[places, 1] * radius
        overlaps = overlap(draw_outlines(fields[places], left, top, radius, torch.zeros(()), len(cover)), cover)
        at = int(overlaps.argmax())
        if float(overlaps[at]) > best[-1]:
            best = (kinds[at], float(left[at]), float(top[at]), float(radius[at]), float(overlaps[at]))
    return best


def measure(cover: Tensor) -> tuple[float, float, float]:
    """Area (the whole picture has 4), and the middle's x and y."""
    line = (torch.arange(len(cover)) + 0.5) * 2 / len(cover) - 1
    total = cover.sum().clamp(min=1e-6)
    return float(total) * 4 / cover.numel(), float((cover.sum(0) @ line) / total), float((cover.sum(1) @ line) / total)


def overlap(drawn: Tensor, cover: Tensor) -> Tensor:
    """(drawn,): what is common, of what either has."""
    return torch.minimum(drawn, cover).sum((1, 2)) / torch.maximum(drawn, cover).sum((1, 2))


def draw_outlines(fields: Tensor, x: Tensor, y: Tensor, radius: Tensor, turn: Tensor, side: int) -> Tensor:
    """(fields, side, side): how much of each pixel is inside. All but `fields` (n, cells, cells) are (n,) or ()."""
    line = (torch.arange(side) + 0.5) * 2 / side - 1
    x, y, radius, turn = (value.expand(len(fields))[:, None, None] for value in (x, y, radius, turn))
    right, below = (line - x) / radius, (line[:, None] - y) / radius
    cos, sin = turn.cos(), turn.sin()
    there = torch.stack([right * cos + below * sin, below * cos - right * sin], -1) / FIELD_REACH
    distance = grid_sample(fields[:, None], there, padding_mode="border", align_corners=False)[:, 0]
    return (0.5 - distance * radius * side / 2).clamp(0, 1)


@cache
def measure_kinds() -> tuple[Tensor, Tensor, Tensor]:
    """Every kind's field, its area and the x and y of its middle, at radius 1."""
    fields = torch.from_numpy(draw_fields())
    line = ((torch.arange(FIELD_CELLS) + 0.5) * 2 / FIELD_CELLS - 1) * FIELD_REACH
    inside = (fields < 0).float()
    cell = (2 * FIELD_REACH / FIELD_CELLS) ** 2
    count = inside.sum((1, 2))
    middles = torch.stack([(inside.sum(1) @ line) / count, (inside.sum(2) @ line) / count], -1)
    return fields, count * cell, middles
