"""What crosses from the front to the engine where texts are read, not continued.

Events of an embedding job: `Output(kind="vectors", body=Vectors)` for some inputs each, in any order; `Ended(receipt)`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec
import numpy as np

from polymux.core.tasks import Vector
from polymux.core.text.flat import flatten

SCORE = "score"
"""The `kind` of the `Output` that carries a `tasks.Score`."""

VECTORS = "vectors"
"""The `kind` of the `Output` that carries `Vectors`."""


class EmbedWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Embed every input. Pooling is the model's own, known to the program."""

    ids: np.ndarray
    """(T,) int32: token ids of all inputs with the model's special tokens, one behind the other."""
    lengths: np.ndarray
    """(inputs,) int32: tokens of each, at least one, within the model's longest input."""
    dimensions: int | None = None
    """Keep the first so many values (Matryoshka), then normalise."""
    normalize: bool = True
    """Scale to unit length."""

    @classmethod
    def of(cls, inputs: Sequence[Sequence[int]], *, dimensions: int | None = None, normalize: bool = True) -> EmbedWork:
        """From the token ids of each input."""
        ids, lengths = flatten(inputs)
        return cls(ids=ids, lengths=lengths, dimensions=dimensions, normalize=normalize)


class Vectors(msgspec.Struct):
    """The embeddings of the inputs from number `first` on: little-endian float32, `width` values each."""

    first: int
    width: int
    data: bytes

    def split(self) -> Iterator[Vector]:
        size = 4 * self.width
        for number, start in enumerate(range(0, len(self.data), size), self.first):
            yield Vector(number, self.data[start : start + size])


class RankWork(msgspec.Struct, kw_only=True):
    """Score every pair. The events are one `Output(kind="score", body=tasks.Score)` per pair, in any order."""

    inputs: list[list[int]]
    """Token ids of both texts with the model's special tokens, never empty, within the model's longest input."""
    segments: list[list[int]]
    """Which of the two texts each token belongs to, 0 or 1."""
