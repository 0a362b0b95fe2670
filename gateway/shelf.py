"""Files that answers point to: kept on disk for a while, under names that cannot be guessed."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path

LIFETIME = 3600.0
"""Seconds that a file is kept."""

ROOM = 4 << 30
"""Bytes of all files: beyond it the oldest go."""


@dataclass(frozen=True)
class Item:
    """A file and what it is."""

    path: Path
    media: str
    size: int
    expires: float
    """On the wall clock."""


class Shelf:
    """`put` is called on a thread, one at a time for each file; everything else on the event loop."""

    def __init__(self, lifetime: float = LIFETIME, room: int = ROOM) -> None:
        self.lifetime = lifetime
        self.room = room
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._items: OrderedDict[str, Item] = OrderedDict()

    def put(self, data: bytes, media: str, suffix: str) -> str:
        """Keep a file; gives its name."""
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="polymux-shelf-")
        name = secrets.token_urlsafe(24) + suffix
        path = Path(self._folder.name) / name
        path.write_bytes(data)
        self._items[name] = Item(path, media, len(data), time.time() + self.lifetime)
        self._tidy()
        return name

    def find(self, name: str) -> Item | None:
        """The file of that name, unless its time is over."""
        self._tidy()
        return self._items.get(name)

    def remove(self, name: str) -> None:
        item = self._items.pop(name, None)
        if item is not None:
            item.path.unlink(missing_ok=True)

    def _tidy(self) -> None:
        now = time.time()
        total = sum(item.size for item in list(self._items.values()))
        for name, item in list(self._items.items()):
            if item.expires > now and (total <= self.room or len(self._items) == 1):
                break
            total -= item.size
            self.remove(name)
