"""What was said so far: items in order, as the protocol shows them and as a chat model reads them."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, Literal

from polymux.core.errors import InvalidRequest
from polymux.gateway.ids import draw_id
from polymux.gateway.realtime.timeline import Timeline

Role = Literal["user", "assistant", "system"]


@dataclass(eq=False)
class Item:
    """One message. `kind` is its content's type: input_text, input_audio, output_text or output_audio."""

    role: Role
    kind: str
    text: str = ""
    id: str = field(default_factory=lambda: f"item_{draw_id()}")
    status: str = "completed"
    timeline: Timeline | None = None
    """Of an answer that is spoken: which words are heard when."""
    heard: asyncio.Event | None = None
    """Of sound that is still written down: set once `text` is all of it."""

    def show(self) -> dict[str, Any]:
        spoken = self.kind.endswith("audio")
        content = {"type": self.kind, "transcript" if spoken else "text": self.text}
        return {
            "id": self.id,
            "object": "realtime.item",
            "type": "message",
            "status": self.status,
            "role": self.role,
            "content": [content],
        }


class Conversation:
    def __init__(self) -> None:
        self.id = f"conv_{draw_id()}"
        self._items: dict[str, Item] = {}

    def __iter__(self) -> Any:
        return iter(self._items.values())

    def find(self, id: str) -> Item:
        """Raises `InvalidRequest`."""
        item = self._items.get(id)
        if item is None:
            raise InvalidRequest(f"the conversation has no item {id[:80]!r}", param="item_id", code="item_not_found")
        return item

    def add(self, item: Item, after: str | None = None) -> str | None:
        """Put `item` behind the one called `after`: "root" is before all, None behind all. The id it now follows.

        Raises `InvalidRequest` when there is no such item, or already one with this id.
        """
        if item.id in self._items:
            raise InvalidRequest(f"there is an item {item.id[:80]!r} already", param="item.id", code="item_exists")
        order = list(self._items.values())
        if after == "root":
            place = 0
        elif after is None:
            place = len(order)
        else:
            place = order.index(self.find(after)) + 1
        previous = order[place - 1].id if place else None
        order.insert(place, item)
        self._items = {each.id: each for each in order}
        return previous

    def remove(self, id: str) -> Item:
        item = self.find(id)
        del self._items[id]
        return item

    def truncate(self, id: str, milliseconds: int) -> Item:
        """Forget what was not played of a spoken answer. Raises `InvalidRequest`."""
        item = self.find(id)
        if item.timeline is None:
            raise InvalidRequest("only spoken answers can be truncated", param="item_id", code="invalid_item")
        if not 0 <= milliseconds <= item.timeline.milliseconds:
            raise InvalidRequest(
                f"this item's audio lasts {item.timeline.milliseconds:.0f} ms and cannot be cut at {milliseconds}",
                param="audio_end_ms",
                code="invalid_value",
            )
        item.text = item.timeline.cut(milliseconds)
        return item


def read_messages(items: Any, instructions: str) -> list[dict[str, str]]:
    """For a chat model. What nobody said is left out."""
    messages = [{"role": "system", "content": instructions}] if instructions else []
    return messages + [{"role": item.role, "content": item.text} for item in items if item.text]
