"""Pictures and clips to make."""

from __future__ import annotations

import msgspec
import numpy as np

from polymux.core.tasks.answers import Done
from polymux.core.vocabulary import Task


class Progress(msgspec.Struct):
    """Denoising of picture (or clip) `index` has done `step` of `steps` steps."""

    index: int
    step: int
    steps: int


class Paint(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pictures to make of a text. What is None is the model's default; how a picture is encoded is the caller's."""

    prompt: str
    negative: str | None = None
    """What to keep away from; with `true_scale`."""
    n: int = 1
    width: int | None = None
    height: int | None = None
    steps: int | None = None
    guidance: float | None = None
    """How closely to follow the text: the scale that a guidance-distilled model reads, of any other the scale of
    classifier-free guidance."""
    true_scale: float | None = None
    """Of classifier-free guidance with the negative prompt, which computes every step twice."""
    seed: int | None = None
    """Picture k of n is the one that n=1 makes with seed + k. None: drawn."""
    source: bytes | None = None
    """A picture file to start from."""
    mask: bytes | None = None
    """A picture file of the same size: what is transparent in it is painted anew, the rest is kept."""
    strength: float | None = None
    """How much of `source` may change, up to 1. None: all where a mask says where, else most."""
    previews: int = 0
    """Looks at each picture while it is made, evenly apart."""
    quality: str | None = None
    """A preset that trades exactness for time: exact, balanced, fast. None: what the operator set."""
    strict: bool = False
    """Every bit the same whatever else runs, at the price of batching."""


class Preview(msgspec.Struct):
    """The `number`-th look at picture `index` while it is made: small, RGB bytes row by row from the top."""

    index: int
    number: int
    width: int
    height: int
    data: bytes
    of_width: int = 0
    """Of the picture itself."""
    of_height: int = 0


class Film(Paint, kw_only=True, omit_defaults=True):
    """A clip to make of a text, or of a text and the picture it begins with (`source`)."""

    frames: int | None = None


class Clip(msgspec.Struct):
    """Clip `index`: `frames` are (frames, height, width, 3) uint8, `rate` of them a second; `seed` makes it again."""

    index: int
    seed: int
    rate: int
    frames: np.ndarray


class Picture(msgspec.Struct):
    """Picture `index`: `data` are RGB bytes, row by row from the top; `seed` makes it again."""

    index: int
    seed: int
    width: int
    height: int
    data: bytes


IMAGE = Task("image", Paint, (Progress, Preview, Picture, Done))
VIDEO = Task("video", Film, (Progress, Preview, Clip, Done))
