"""Follows the one thing of a clip through its frames, and tells how it moves; no model is asked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from pictures import FILM_GROWTH, FILM_TURN, FILM_WAY
from scenes import KINDS, Scene
from things import draw_outlines, find_ground, measure_kinds, overlap, see
from torch import Tensor

SAME_AFTER = {"square": 90.0, "triangle": 120.0, "star": 72.0, "cross": 90.0}
"""Degrees after which a shape looks the same."""
FINENESS = 3.0
"""Degrees between the turns that are tried."""


@dataclass(frozen=True)
class Track:
    """What a clip's thing does from the first to the last frame."""

    right: float
    down: float
    growth: float
    """The radius at the end, of that at the beginning."""
    lost: int
    """Frames without exactly one thing."""
    kinds: tuple[str, ...]
    colours: tuple[str, ...]
    """In the frames that have one thing."""


def follow(clip: np.ndarray) -> Track:
    """`clip`: (frames, side, side, 3) uint8."""
    seen = [see(frame) for frame in clip]
    found = [things[0] for things in seen if len(things) == 1]
    if len(found) < 2:
        return Track(0.0, 0.0, 1.0, len(seen), (), ())
    first, last = found[0], found[-1]
    return Track(
        right=last.x - first.x,
        down=last.y - first.y,
        growth=last.radius / max(first.radius, 1e-3),
        lost=len(seen) - len(found),
        kinds=tuple(thing.kind for thing in found),
        colours=tuple(thing.colour for thing in found),
    )


def measure_turn(clip: np.ndarray, kind: str) -> float:
    """Degrees clockwise over the clip; from one frame to the next less than half of what leaves the shape the same."""
    if kind not in SAME_AFTER:
        return 0.0
    same = SAME_AFTER[kind]
    angles = [fit_angle(frame, kind, same) for frame in clip]
    steps = np.diff(angles)
    return float(((steps + same / 2) % same - same / 2).sum())


def fit_angle(frame: np.ndarray, kind: str, same: float) -> float:
    """Degrees from 0 to `same`: how the outline lies best on what is there."""
    pixels = torch.tensor(frame).float() / 255
    cover = ((pixels - find_ground(pixels)).abs().amax(-1) * 2).clamp(0, 1)
    cover = cover * (cover > 0.3)
    tried = torch.arange(0, same, FINENESS)
    return float(tried[int(overlap(draw_turned(cover, kind, tried), cover).argmax())])


def draw_turned(cover: Tensor, kind: str, degrees: Tensor) -> Tensor:
    """The kind's outline where the cover is and as large, turned: (degrees, side, side)."""
    fields, areas, middles = measure_kinds()
    at = KINDS.index(kind)
    side = len(cover)
    line = (torch.arange(side) + 0.5) * 2 / side - 1
    total = cover.sum().clamp(min=1e-6)
    radius = (total * 4 / side**2 / areas[at]).sqrt()
    turn = torch.deg2rad(degrees)
    off_x, off_y = middles[at] * radius
    x = cover.sum(0) @ line / total - (off_x * turn.cos() - off_y * turn.sin())
    y = cover.sum(1) @ line / total - (off_x * turn.sin() + off_y * turn.cos())
    return draw_outlines(fields[at].expand(len(turn), -1, -1), x, y, radius, turn, side)


def find_motion(clip: np.ndarray, track: Track, kind: str) -> str:
    """The name of the motion; "" where nothing moves as much as half of what the films do. Turns are those of a `kind`,
    and looked for where nothing else is found: they are measured outline by outline."""
    way, swell, turn = FILM_WAY, (FILM_GROWTH[1] / FILM_GROWTH[0]) ** 0.5, FILM_TURN * 180 / np.pi / 2
    if max(abs(track.right), abs(track.down)) > way:
        if abs(track.right) > abs(track.down):
            return "right" if track.right > 0 else "left"
        return "down" if track.down > 0 else "up"
    if track.growth > swell or track.growth < 1 / swell:
        return "growing" if track.growth > 1 else "shrinking"
    turned = measure_turn(clip, kind)
    if abs(turned) > turn:
        return "clockwise" if turned > 0 else "anticlockwise"
    return ""


def find_film_faults(clip: np.ndarray, scene: Scene) -> list[str]:
    """What is wrong with a clip of a scene of the family "film": nothing, or some of motion, kind, colour, lost."""
    thing = scene.things[0]
    track = follow(clip)
    faults = []
    if find_motion(clip, track, thing.kind) != scene.how:
        faults.append("motion")
    turning = scene.how.endswith("wise")  # a turned shape is judged by its first frame, which stands upright
    told = track.kinds[:1] if turning else track.kinds
    if sum(kind == thing.kind for kind in told) * 2 <= len(told):
        faults.append("kind")
    if sum(colour == thing.colour for colour in track.colours) * 2 <= len(track.colours):
        faults.append("colour")
    if track.lost > len(clip) // 4:
        faults.append("lost")
    return faults
