"""A source turns the part of a reference after its scheme into something on the local disk."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

Report = Callable[[str], None]
"""Told in one line what takes long."""


@dataclass(frozen=True)
class Located:
    """What a source found. `identity` changes when the content does; converted copies are kept under it."""

    path: Path
    """The folder, or the one file."""
    identity: str
    """Changes when the files do: caches are named after it."""


class ModelSource(ABC):
    """One scheme of model references, such as `hf` in `hf:org/name`. Registered by the `model_sources` hook."""

    scheme: str
    """What stands before the colon of its references."""

    @abstractmethod
    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        """The file or folder behind `name`, fetched if need be, and verified against `sha256` where one is given.

        Safe to call from two processes at once. Raises `ModelError` saying what the user can do.
        """

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        """Whether `resolve` would need no network. Only looks; never raises."""
        return False
