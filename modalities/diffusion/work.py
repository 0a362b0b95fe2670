"""What crosses between the front and the engine.

Events of a job: `Output(kind="progress", body=tasks.Progress)` per picture and step; `Output(kind="preview",
body=Sketched)` where previews were asked for; `Output(kind="picture", body=Painted)` per picture, as soon as it is
there; `Ended(receipt)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

PICTURE = "picture"
PREVIEW = "preview"


class Prompt(msgspec.Struct, frozen=True):
    """A text as each of the model's encoders reads it: ids, padded to the encoder's length."""

    ids: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    """Ids before the padding."""
    empty: bool = False
    """There was no text: some models read zeros in its place."""

    @property
    def size(self) -> int:
        return max(map(len, self.ids))


class Text(NamedTuple):
    """What a text encoder is given, in the engine."""

    prompt: Prompt
    adapter: Tensor | None
    """(size,): the block of the adapter that changes the encoder."""


class Source(msgspec.Struct, kw_only=True):
    """A picture to start from. Arrays have the size that is asked for."""

    pixels: np.ndarray
    """(height, width, 3) uint8."""
    mask: np.ndarray | None = None
    """(height, width) uint8: 1 where the picture is painted anew; None: everywhere."""
    strength: float = 1.0
    """Share of the steps that are run: 1 keeps nothing but what the mask protects."""


class PaintWork(msgspec.Struct, kw_only=True):
    """Everything is checked: the size divides into the model's tokens."""

    prompt: Prompt
    negative: Prompt | None
    """With it, every step has a second branch, and `scale` weighs the two."""
    n: int
    width: int
    height: int
    frames: int = 1
    steps: int
    guidance: float
    """What a guidance-distilled model reads."""
    scale: float
    seed: int
    source: Source | None = None
    previews: int = 0
    """Pictures in between that the caller wants to see, of each."""
    quality: str = ""
    """A preset of step caching, by name; empty: what the operator set."""
    adapter: str | None = None
    """The name of the adapter that changes the model for these pictures."""
    strict: bool = False
    """Bitwise the same whatever else runs: no row shares a pass with another request's."""


class Painted(msgspec.Struct):
    """`pixels`: (height, width, 3) uint8, of a clip (frames, height, width, 3)."""

    index: int
    seed: int
    pixels: np.ndarray


class Sketched(msgspec.Struct):
    """The `number`-th preview of picture `index`. `pixels`: (height, width, 3) uint8, smaller than the picture."""

    index: int
    number: int
    pixels: np.ndarray
