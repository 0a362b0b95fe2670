"""Whether a picture shows a scene: rules over what `things` finds."""

from __future__ import annotations

from math import hypot

import numpy as np
from pictures import OFFSETS, PAIR_APART, RADII
from scenes import DIGITS, SIZES, WORDS, Scene, Thing
from things import Seen, see

ALIKE = 0.7
"""Overlap with its outline below which a thing is no such thing."""
NEAR = 0.25
"""How far a thing may stand from its place."""


def find_faults(picture: np.ndarray, scene: Scene) -> list[str]:
    """What is wrong with a picture, (side, side, 3) uint8, of a scene: nothing, or some of count, kind, colour, size,
    place and shape (no clear outline)."""
    if scene.family in ("digit", "word"):
        seen = see(picture, DIGITS if scene.family == "digit" else WORDS, whole=True)
        return check_things(seen, scene)
    seen = see(picture)
    if len(seen) != len(scene.things):
        return ["count"]
    if scene.family == "pair":
        axis = "x" if scene.how == "left" else "y"
        seen = sorted(seen, key=lambda thing: getattr(thing, axis))
        faults = check_things(seen, scene)
        if getattr(seen[1], axis) - getattr(seen[0], axis) < PAIR_APART:
            faults.append("place")
        return faults
    faults = check_things(seen, scene)
    if scene.family == "one":
        x, y = OFFSETS[scene.how]
        if hypot(seen[0].x - x, seen[0].y - y) > NEAR:
            faults.append("place")
    return faults


def check_things(seen: list[Seen], scene: Scene) -> list[str]:
    """In the scene's order."""
    if len(seen) != len(scene.things):
        return ["count"]
    faults = set()
    sized = any(thing.size != "medium" for thing in scene.things)
    for found, wanted in zip(seen, scene.things, strict=True):
        if found.kind != wanted.kind:
            faults.add("kind")
        if found.colour != wanted.colour:
            faults.add("colour")
        if found.alike < ALIKE:
            faults.add("shape")
        if sized and not has_size(found, wanted, scene.family):
            faults.add("size")
    return sorted(faults)


def has_size(found: Seen, wanted: Thing, family: str) -> bool:
    """Nearer to the size that is told than to another."""
    bounds = RADII[family]
    at = SIZES.index(wanted.size)
    least = 0.0 if at == 0 else (bounds[2 * at - 1] + bounds[2 * at]) / 2
    most = 9.0 if at == 2 else (bounds[2 * at + 1] + bounds[2 * at + 2]) / 2
    return least <= found.radius <= most
