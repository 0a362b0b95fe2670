"""The access log's way out: lines are kept and written together, a few times a second, by a thread.

Neither a stalled pipe nor waking a thread for each line then costs the event loop anything.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from typing import TextIO

EVERY = 0.25
"""Seconds between two writes."""

MAX_LINES = 100_000
"""Beyond this the oldest lines are dropped: a log that nobody reads must not fill the memory."""


class LineHandler(logging.Handler):
    """Writes bare messages to `stream` until closed; closing writes what is left."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream
        self._lines: deque[str] = deque(maxlen=MAX_LINES)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_regularly, name="access log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())

    def close(self) -> None:
        self._closing.set()
        self._thread.join(timeout=1)
        super().close()

    def _write_regularly(self) -> None:
        while not self._closing.wait(EVERY):
            self._write()
        self._write()

    def _write(self) -> None:
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        if not lines:
            return
        try:
            self._stream.write("\n".join(lines) + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            self._lines.clear()  # the reader is gone; serving goes on
