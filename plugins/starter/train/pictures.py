"""Draws scenes as pictures and films, many at once, on any device.

easel = Easel(list_scenes(held_out=False), side=64, device="cuda")
index = easel.choose(1024, generator)                  # every family as often
pictures = easel.draw(easel.lay(index, generator))     # (1024, 3, 64, 64), 0 to 1
films = easel.draw_films(index, frames=9, generator)   # (1024, 9, 3, 64, 64), of scenes of the family "film"

Every kind of thing is a field of distances to its outline, sampled where the thing stands: so edges are smooth at any
size and turn, and a batch is one kernel. Coordinates run from -1 to 1, y downwards.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from math import pi

import torch
from outlines import FIELD_REACH, draw_fields
from scenes import COLOURS, FAMILIES, KINDS, MOST, MOTIONS, PLACES, RELATIONS, SIZES, Scene
from torch import Generator, Tensor
from torch.nn.functional import grid_sample

RADII = {"one": (0.16, 0.22, 0.28, 0.34, 0.37, 0.42), "film": (0.16, 0.22, 0.28, 0.34, 0.37, 0.42)}
RADII |= {"pair": RADII["one"], "count": (0.19, 0.25) * 3, "digit": (0.45, 0.65) * 3, "word": (0.78, 0.9) * 3}
"""Least and most of each size, by family."""

OFFSETS = {"middle": (0, 0), "left": (-0.5, 0), "right": (0.5, 0), "top": (0, -0.5), "bottom": (0, 0.5)}
LOOSE = {"one": (0.06, 0.06), "film": (0.1, 0.1), "count": (0.05, 0.05), "digit": (0.25, 0.2), "word": (0.05, 0.4)}
"""How far things of a family may stand from where they should, across and down."""
PAIR_APART, PAIR_LOOSE, PAIR_SIDEWAYS = 0.5, 0.05, 0.3
CELL = 0.62
"""Between the nine places of things that are counted."""
SHADE = 0.06
"""How far a colour may be from its middle, of 1."""
GROUND = (0.86, 1.0)
"""Grey of what is behind."""
FILM_WAY, FILM_GROWTH, FILM_TURN = 0.55, (0.16, 0.48), pi / 2


@dataclass
class Layout:
    """Where everything is: tensors of (batch, things), `colour` (batch, things, 3), `ground` (batch, 3)."""

    kind: Tensor
    """Index into `KINDS`; -1: nothing."""
    colour: Tensor
    x: Tensor
    y: Tensor
    radius: Tensor
    turn: Tensor
    """Radians, clockwise."""
    ground: Tensor

    def repeat(self, frames: int) -> Layout:
        """Each row `frames` times, one behind the other."""
        return Layout(*(getattr(self, each.name).repeat_interleave(frames, 0) for each in fields(self)))


class Easel:
    """`scenes` are drawn on squares of `side` pixels."""

    def __init__(self, scenes: list[Scene], side: int, device: torch.device | str = "cpu") -> None:
        self.scenes = scenes
        self.side = side
        self.device = torch.device(device)
        colours, families = list(COLOURS), list(FAMILIES)
        self._fields = _fields().to(self.device)[:, None]
        self._palette = torch.tensor(list(COLOURS.values()), device=self.device) / 255
        self.kind = self._tabulate([[KINDS.index(each.kind) for each in scene.things] for scene in scenes])
        self.colour = self._tabulate([[colours.index(each.colour) for each in scene.things] for scene in scenes])
        self.size = self._tabulate([[SIZES.index(each.size) for each in scene.things] for scene in scenes])
        self.family = torch.tensor([families.index(scene.family) for scene in scenes], device=self.device)
        self._ways = {way: i for i, way in enumerate(dict.fromkeys((*PLACES, *RELATIONS, *MOTIONS)))}
        self.how = torch.tensor([self._ways.get(scene.how, -1) for scene in scenes], device=self.device)
        counts = torch.bincount(self.family, minlength=len(families)).clamp(min=1)
        self._chances = 1 / counts[self.family].float()

    def _tabulate(self, rows: list[list[int]]) -> Tensor:
        """(scenes, MOST), -1 behind the last thing."""
        return torch.tensor([row + [-1] * (MOST - len(row)) for row in rows], device=self.device)

    def choose(self, batch: int, generator: Generator, weights: dict[str, float] | None = None) -> Tensor:
        """(batch,) scenes; families come as often as each other, or by `weights` (1 where none is given)."""
        chances = self._chances
        if weights is not None:
            told = torch.tensor([weights.get(family, 1.0) for family in FAMILIES], device=self.device)
            chances = chances * told[self.family]
        return torch.multinomial(chances, batch, replacement=True, generator=generator)

    def lay(self, index: Tensor, generator: Generator) -> Layout:
        """Places the scenes' things: their looseness, sizes and shades are random, their facts are not."""
        kind, family, how = self.kind[index], self.family[index], self.how[index]
        shape = kind.shape

        def within(least: Tensor | float, most: Tensor | float, size: tuple[int, ...] = shape) -> Tensor:
            return least + (most - least) * torch.rand(size, generator=generator, device=self.device)

        radii = torch.tensor([RADII[each] for each in FAMILIES], device=self.device).view(len(FAMILIES), len(SIZES), 2)
        bounds = radii[family[:, None], self.size[index].clamp(min=0)]
        radius = within(bounds[..., 0], bounds[..., 1])
        loose = torch.tensor([LOOSE.get(each, (0.0, 0.0)) for each in FAMILIES], device=self.device)[family]
        x, y = (within(-loose[:, axis, None], loose[:, axis, None]) for axis in (0, 1))

        place = torch.zeros(len(self._ways), 2, device=self.device)
        for name, offset in OFFSETS.items():
            place[self._ways[name]] = torch.tensor(offset, device=self.device)
        alone = family == list(FAMILIES).index("one")
        x, y = x + place[how, 0, None] * alone[:, None], y + place[how, 1, None] * alone[:, None]

        cells = torch.rand(len(index), 9, generator=generator, device=self.device).argsort(1)[:, : shape[1]]
        counted = (family == list(FAMILIES).index("count"))[:, None]
        x, y = x + (cells % 3 - 1) * CELL * counted, y + (cells // 3 - 1) * CELL * counted

        paired = (family == list(FAMILIES).index("pair"))[:, None]
        sign = torch.tensor([-1.0, 1.0] + [0.0] * (MOST - 2), device=self.device)
        along = sign * PAIR_APART + within(-PAIR_LOOSE, PAIR_LOOSE)
        across = within(-PAIR_SIDEWAYS, PAIR_SIDEWAYS)
        beside = (how == self._ways["left"])[:, None]
        x = torch.where(paired, torch.where(beside, along, across), x)
        y = torch.where(paired, torch.where(beside, across, along), y)

        shades = within(-SHADE, SHADE, (*shape, 3))
        colour = (self._palette[self.colour[index].clamp(min=0)] + shades).clamp(0, 1)
        ground = within(*GROUND, (len(index), 1)).expand(-1, 3)
        return Layout(kind, colour, x, y, radius, torch.zeros_like(x), ground)

    def draw(self, layout: Layout) -> Tensor:
        """(batch, 3, side, side) float32 from 0 to 1; later things lie on earlier ones."""
        line = (torch.arange(self.side, device=self.device) + 0.5) * 2 / self.side - 1
        down, across = torch.meshgrid(line, line, indexing="ij")
        picture = layout.ground[:, :, None, None].expand(-1, -1, self.side, self.side).clone()
        for thing in range(layout.kind.shape[1]):
            rows = (layout.kind[:, thing] >= 0).nonzero()[:, 0]
            if not len(rows):
                break
            cover = self._cover(layout, rows, thing, across, down)
            colour = layout.colour[rows, thing, :, None, None]
            picture[rows] = torch.lerp(picture[rows], colour.expand(-1, -1, self.side, self.side), cover)
        return picture

    def _cover(self, layout: Layout, rows: Tensor, thing: int, across: Tensor, down: Tensor) -> Tensor:
        """(rows, 1, side, side): how much of each pixel a thing covers."""
        x, y, radius, turn, kind = (
            getattr(layout, name)[rows, thing, None, None] for name in ("x", "y", "radius", "turn", "kind")
        )
        right, below = (across - x) / radius, (down - y) / radius
        cos, sin = turn.cos(), turn.sin()
        there = torch.stack([right * cos + below * sin, below * cos - right * sin], -1) / FIELD_REACH
        distance = grid_sample(
            self._fields[kind[:, 0, 0]], there, mode="bilinear", padding_mode="border", align_corners=False
        )
        return (0.5 - distance * radius[:, None] * self.side / 2).clamp(0, 1)

    def mark(self, layout: Layout, cells: int) -> tuple[Tensor, Tensor]:
        """Which kind and which colour covers most of each of `cells` x `cells` fields, (batch, cells, cells) int64
        each: index into `KINDS` and `COLOURS`, behind the last where nothing does. For losses that teach to see."""
        line = (torch.arange(self.side, device=self.device) + 0.5) * 2 / self.side - 1
        down, across = torch.meshgrid(line, line, indexing="ij")
        rows = torch.arange(len(layout.kind), device=self.device)
        covers = []
        for thing in range(layout.kind.shape[1]):
            shown = layout.kind[:, thing, None, None] >= 0
            cover = self._cover(layout, rows, thing, across, down)[:, 0] * shown
            covers.append(cover.unflatten(2, (cells, -1)).unflatten(1, (cells, -1)).mean((2, 4)))
        most, which = torch.stack(covers).max(0)
        seen = most > 0.1
        kind = layout.kind.gather(1, which.flatten(1)).view_as(which)
        nearest = torch.cdist(layout.colour, self._palette.expand(len(rows), -1, -1)).argmin(-1)
        colour = nearest.gather(1, which.flatten(1)).view_as(which)
        return torch.where(seen, kind, len(KINDS)), torch.where(seen, colour, len(COLOURS))

    def draw_films(self, index: Tensor, frames: int, generator: Generator) -> Tensor:
        """(batch, frames, 3, side, side) of scenes of the family "film", each a whole motion."""
        layout = self.lay(index, generator).repeat(frames)
        how = self.how[index].repeat_interleave(frames)[:, None]
        time = torch.linspace(0, 1, frames, device=self.device).repeat(len(index))[:, None]
        way = (time * 2 - 1) * FILM_WAY
        for name, axis, sign in (("left", "x", -1), ("right", "x", 1), ("up", "y", -1), ("down", "y", 1)):
            shift = torch.where(how == self._ways[name], sign * way, 0.0)
            setattr(layout, axis, getattr(layout, axis) + shift)
        least, most = FILM_GROWTH
        for name, part in (("growing", time), ("shrinking", 1 - time)):
            layout.radius = torch.where(how == self._ways[name], least + (most - least) * part, layout.radius)
        for name, sign in (("clockwise", 1), ("anticlockwise", -1)):
            layout.turn = torch.where(how == self._ways[name], sign * FILM_TURN * time, layout.turn)
        return self.draw(layout).unflatten(0, (len(index), frames))


@cache
def _fields() -> Tensor:
    """(KINDS, cells, cells) float32."""
    return torch.from_numpy(draw_fields())
