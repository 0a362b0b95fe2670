"""What answers cost, for those that have no place to say it: bytes of sound are the file and nothing else."""

from __future__ import annotations

from collections import OrderedDict, deque
from dataclasses import dataclass

from polymux.core.vocabulary import Receipt

KEPT = 1024
"""Requests whose receipts are kept; the oldest are forgotten."""

PER_REQUEST = 16
"""Of one request; a socket is one, however often it asks."""


@dataclass(frozen=True)
class Entry:
    model: str
    task: str
    receipt: Receipt


class Receipts:
    """By request id, as `x-request-id` says it."""

    def __init__(self) -> None:
        self._entries: OrderedDict[str, deque[Entry]] = OrderedDict()

    def keep(self, request_id: str, entry: Entry) -> None:
        self._entries.setdefault(request_id, deque(maxlen=PER_REQUEST)).append(entry)
        self._entries.move_to_end(request_id)
        if len(self._entries) > KEPT:
            self._entries.popitem(last=False)

    def find(self, request_id: str) -> list[Entry]:
        """In the order of their ends; empty when there are none, or none any more."""
        return list(self._entries.get(request_id, ()))
