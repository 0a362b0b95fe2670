"""What the starters are trained on, in words: scenes of coloured shapes, digits and words, their captions, and the
questions that can be asked about them.

Scenes are few enough to be listed, so training reads tables and a split is a property of a scene. What differs between
two pictures of one scene (where exactly, which shade, how wide) is drawn anew each time, in `pictures.py`.
"""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from functools import cached_property

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
DIGITS = tuple("0123456789")
WORDS = ("CAT", "DOG", "SUN", "CAR", "HAT", "BOX", "CUP", "BEE", "FOX", "KEY")
KINDS = (*SHAPES, *DIGITS, *WORDS)

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 160, 60),
    "blue": (50, 80, 220),
    "yellow": (240, 210, 40),
    "purple": (140, 50, 170),
    "orange": (245, 135, 30),
    "cyan": (60, 200, 220),
    "black": (25, 25, 25),
}
"""Red, green and blue of 255 at their middle."""

SIZES = ("small", "medium", "large")
PLACES = ("middle", "left", "right", "top", "bottom")
RELATIONS = ("left", "above")
"""Of the first thing of a pair to the second."""
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}
MOTIONS = ("left", "right", "up", "down", "growing", "shrinking", "clockwise", "anticlockwise")
TURNED = ("square", "triangle", "star", "cross")
"""Shapes that look different when they turn."""
NUMBERS = ("zero", "one", "two", "three", "four", "five")
MOST = 5
"""Things in a scene."""

HELD_OUT = 5
"""One scene in so many is kept from training."""


@dataclass(frozen=True)
class Thing:
    """`kind` is one of `KINDS`, `colour` of `COLOURS`, `size` of `SIZES`."""

    kind: str
    colour: str
    size: str = "medium"

    @property
    def phrase(self) -> str:
        """`red circle`, with its size where that is told."""
        told = f"{self.size} " if self.size != "medium" else ""
        return f"{told}{self.colour} {self.kind}"


@dataclass(frozen=True)
class Scene:
    """`family` is one of `FAMILIES`; `how` the place of one thing, the relation of a pair, the motion of a film."""

    family: str
    things: tuple[Thing, ...]
    how: str = ""

    @cached_property
    def caption(self) -> str:
        """The scene in words; no two scenes have the same."""
        first = self.things[0]
        if self.family == "one":
            where = "in the middle" if self.how == "middle" else f"at the {self.how}"
            return f"a {first.phrase} {where}"
        if self.family == "pair":
            between = "left of" if self.how == "left" else self.how
            return f"{with_article(first.phrase)} {between} {with_article(self.things[1].phrase)}"
        if self.family == "count":
            return f"{NUMBERS[len(self.things)]} {first.colour} {plural(first.kind)}"
        if self.family == "film":
            return f"{with_article(first.phrase)} {tell_motion(self.how)}"
        return f"the {self.family} {first.kind} in {first.colour}"

    @cached_property
    def held_out(self) -> bool:
        """Whether it is kept from training, by the hash of its caption: the same everywhere and for all models."""
        return hashlib.sha256(self.caption.encode()).digest()[0] % HELD_OUT == 0


def with_article(phrase: str) -> str:
    return f"an {phrase}" if phrase[0] in "aeiou" else f"a {phrase}"


def plural(kind: str) -> str:
    return f"{kind}es" if kind.endswith("s") else f"{kind}s"


def tell_motion(motion: str) -> str:
    if motion in ("growing", "shrinking"):
        return motion
    return f"turning {motion}" if motion.endswith("wise") else f"moving {motion}"


def list_ones() -> list[Scene]:
    """One shape, small or large, at a place."""
    wanted = itertools.product(PLACES, SHAPES, COLOURS, ("small", "large"))
    return [Scene("one", (Thing(shape, colour, size),), place) for place, shape, colour, size in wanted]


def list_pairs() -> list[Scene]:
    """Two shapes that share neither shape nor colour, side by side or one above the other, of one size or not."""
    sizes = (("medium", "medium"), ("large", "small"), ("small", "large"))
    scenes = []
    for how, (first, second), (one, other), (left, right) in itertools.product(
        RELATIONS, itertools.permutations(SHAPES, 2), itertools.permutations(COLOURS, 2), sizes
    ):
        scenes.append(Scene("pair", (Thing(first, one, left), Thing(second, other, right)), how))
    return scenes


def list_counts() -> list[Scene]:
    """Two to five equal shapes."""
    wanted = itertools.product(range(2, MOST + 1), SHAPES, COLOURS)
    return [Scene("count", (Thing(shape, colour),) * count) for count, shape, colour in wanted]


def list_digits() -> list[Scene]:
    return [Scene("digit", (Thing(digit, colour),)) for digit, colour in itertools.product(DIGITS, COLOURS)]


def list_words() -> list[Scene]:
    return [Scene("word", (Thing(word, colour),)) for word, colour in itertools.product(WORDS, COLOURS)]


def list_films() -> list[Scene]:
    """One shape that moves, grows, shrinks or turns."""
    wanted = itertools.product(MOTIONS, SHAPES, COLOURS)
    return [
        Scene("film", (Thing(shape, colour),), motion)
        for motion, shape, colour in wanted
        if shape in TURNED or not motion.endswith("wise")
    ]


FAMILIES = {
    "one": list_ones,
    "pair": list_pairs,
    "count": list_counts,
    "digit": list_digits,
    "word": list_words,
    "film": list_films,
}
STILL = ("one", "pair", "count", "digit", "word")


def list_scenes(families: tuple[str, ...] = STILL, *, held_out: bool) -> list[Scene]:
    """All scenes of these families that training sees, or all that it does not, in one order."""
    return [scene for family in families for scene in FAMILIES[family]() if scene.held_out is held_out]
