"""A client's frames: from the wire to events, items, and what is wrong with them."""

from __future__ import annotations

from typing import Any

import msgspec

from polymux.core.errors import InvalidRequest
from polymux.gateway.realtime.conversation import Item
from polymux.gateway.schemas.realtime import MessageItem


class ActiveResponse(InvalidRequest):
    code = "conversation_already_has_active_response"


class NoResponse(InvalidRequest):
    code = "response_cancel_not_active"


def read_event(message: Any) -> dict[str, Any]:
    """The JSON object of a text frame. Raises `InvalidRequest`."""
    if message.get("text") is None:
        raise InvalidRequest("events are JSON in text frames; sound is base64 inside of them", code="invalid_event")
    try:
        wire = msgspec.json.decode(message["text"])
    except (msgspec.MsgspecError, RecursionError, UnicodeError) as error:
        raise InvalidRequest(f"the event is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(wire, dict):
        raise InvalidRequest("an event is a JSON object", code="invalid_event")
    return wire


def read_item(wire: MessageItem) -> Item:
    kind = "output_text" if wire.role == "assistant" else "input_text"
    item = Item(wire.role, kind, wire.text)
    if wire.id is not None:
        item.id = wire.id
    return item
