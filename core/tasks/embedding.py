"""Vectors of texts and pictures, and how well texts go together."""

from __future__ import annotations

from typing import Any

import msgspec

from polymux.core.tasks.answers import Done
from polymux.core.vocabulary import Task


class Embed(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Texts, token ids or pictures to embed, in order. `dimensions` cuts (Matryoshka) and normalises again."""

    inputs: list[str | list[int] | dict[str, Any]]
    """A picture is a part like those of a chat: {"type": "image_url", "image_url": {"url": ...}}; or a text is."""
    dimensions: int | None = None
    truncate: bool = False
    prompt: str | None = None
    """Which of the model's own prompts comes before every text; None: its default."""


class Vector(msgspec.Struct):
    """The embedding of input `index`: little-endian float32, one value per dimension."""

    index: int
    data: bytes


class Rank(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Pairs of texts to compare: for a reranker, a query and a document each."""

    pairs: list[tuple[str, str]]
    truncate: bool = False
    """Cut a second text that is too long instead of refusing it."""


class Score(msgspec.Struct):
    """How well the texts of pair `index` go together: from 0 to 1."""

    index: int
    score: float


EMBED = Task("embed", Embed, (Vector, Done))
RANK = Task("rank", Rank, (Score, Done))
