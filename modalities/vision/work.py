"""What crosses between the front and the engine.

Events of a chat are those of a generation job; of an embedding one `Output(kind="vector", body=tasks.Vector)` per
input, in any order, then `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from polymux.core.generation.work import GenerateWork

VECTOR = "vector"
"""The `kind` of the `Output` that carries a `tasks.Vector`."""


class Item(msgspec.Struct):
    """What the encoder takes in one piece: a tile, a picture, a clip."""

    pixels: np.ndarray
    """(frames or tiles, height, width, 3) uint8, of the size that the encoder works at."""
    digest: bytes
    """Names pixels, shape, and how they were made."""
    starts: list[int]
    """Where its vectors stand in the prompt, in order: stretches. The ids there stand for nothing."""
    counts: list[int]
    """How many vectors each stretch has."""
    size: tuple[int, int] = (0, 0)
    """Height and width of the picture it was made of."""


class Picture(msgspec.Struct):
    """One picture, or clip, of the prompt."""

    items: list[Item]


class LookWork(GenerateWork, kw_only=True, omit_defaults=True):
    """Continue a prompt that holds pictures: with any, it is the only one."""

    pictures: list[Picture] = msgspec.field(default_factory=list)
    """In the order of the prompt."""
    positions: np.ndarray | None = None
    """(axes, prompt) int64, for models whose tokens stand at several positions at once."""


class ShowWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Embed texts and pictures, by their numbers in the request."""

    texts: dict[int, list[int]] = msgspec.field(default_factory=dict)
    """Token ids, never empty, within the model's longest input."""
    pictures: dict[int, Item] = msgspec.field(default_factory=dict)
    """Without places: there is no prompt."""
    tokens: int = 0
    """Of all texts."""
