"""What crosses between the front and the engine.

Events of a job: `Output(kind="progress", body=tasks.Progress)` per picture and step; `Output(kind="picture",
body=Painted)` per picture, as soon as it is there; `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec
import numpy as np

PICTURE = "picture"


class Prompt(msgspec.Struct, frozen=True):
    """A text as both encoders read it: padded to their lengths."""

    pooled: tuple[int, ...]
    """For the encoder whose pooled output is used."""
    tokens: tuple[int, ...]
    """For the encoder whose token embeddings are used."""


class PaintWork(msgspec.Struct, kw_only=True):
    """Everything is checked: the size divides into the model's tokens."""

    prompt: Prompt
    negative: Prompt | None
    n: int
    width: int
    height: int
    steps: int
    guidance: float
    true_scale: float
    seed: int


class Painted(msgspec.Struct):
    """`pixels`: (height, width, 3) uint8."""

    index: int
    seed: int
    pixels: np.ndarray
