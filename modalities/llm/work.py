"""What crosses from the front to the engine where texts are read, not continued.

Events of an embedding job: one `Output(kind="vector", body=tasks.Vector)` per input, in any order; `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec

SCORE = "score"
"""The `kind` of the `Output` that carries a `tasks.Score`."""

VECTOR = "vector"
"""The `kind` of the `Output` that carries a `tasks.Vector`."""


class EmbedWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Embed every input. Pooling is the model's own, known to the program."""

    inputs: list[list[int]]
    """Token ids with the model's special tokens, never empty, within the model's longest input."""
    dimensions: int | None = None
    """Keep the first so many values (Matryoshka), then normalise."""
    normalize: bool = True
    """Scale to unit length."""


class RankWork(msgspec.Struct, kw_only=True):
    """Score every pair. The events are one `Output(kind="score", body=tasks.Score)` per pair, in any order."""

    inputs: list[list[int]]
    """Token ids of both texts with the model's special tokens, never empty, within the model's longest input."""
    segments: list[list[int]]
    """Which of the two texts each token belongs to, 0 or 1."""
