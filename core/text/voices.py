"""Which voice a request means: the model's own names first, then the names that OpenAI's clients hard-code."""

from __future__ import annotations

from collections.abc import Sequence

from polymux.core.errors import InvalidRequest

WELL_KNOWN = frozenset(
    ("alloy", "ash", "ballad", "cedar", "coral", "echo", "fable", "marin", "nova", "onyx", "sage", "shimmer", "verse")
)
"""OpenAI's voices. A model that has none of that name says it with its default voice."""


def choose_voice(name: str | None, voices: Sequence[str]) -> str:
    """One of the model's `voices`; the first is its default. Raises `InvalidRequest` for a name nobody knows."""
    if name is None or (name in WELL_KNOWN and name not in voices):
        return voices[0]
    if name in voices:
        return name
    raise InvalidRequest(f"there is no voice {name[:100]!r}; this model has: {', '.join(voices)}", param="voice")
