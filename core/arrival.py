"""A file that still arrives: whoever reads it waits for the bytes that are not there yet."""

from __future__ import annotations

import os
import tempfile
import threading

import msgspec

from polymux.core.errors import InternalError

MOST_ARRIVING = 16
"""Files that are read while they arrive; each takes a thread that waits for its sender. Further ones are read once
they are complete."""


class ArrivingFile:
    """It lies on disk at `path` until it is closed. One thread writes it, any others read it."""

    def __init__(self) -> None:
        # the file lives as long as its answer
        self._file = tempfile.NamedTemporaryFile(prefix="polymux-upload-", buffering=0)  # noqa: SIM115
        self.path = self._file.name
        self.size = 0
        """Bytes that are there."""
        self.complete = False
        self._closed = False
        self._grown = threading.Condition()

    def write(self, data: bytes) -> None:
        """Raises `OSError` when the disk is full."""
        rest = memoryview(data)
        while rest:
            rest = rest[self._file.write(rest) :]
        with self._grown:
            self.size += len(data)
            self._grown.notify_all()

    def finish(self) -> None:
        """No bytes follow."""
        with self._grown:
            self.complete = True
            self._grown.notify_all()

    def read(self, start: int, count: int) -> bytes:
        """At most `count` bytes from byte `start` on, none at the end. Waits for the first of them.

        Raises `InternalError` when the file is closed: its sender has left.
        """
        with self._grown:
            self._grown.wait_for(lambda: self._closed or self.complete or self.size > start)
            if self._closed:
                raise InternalError("this file is gone: its sender has left")
            return os.pread(self._file.fileno(), count, start)

    def wait(self) -> None:
        """Until all of it is there. Raises `InternalError` when it is closed before that."""
        with self._grown:
            self._grown.wait_for(lambda: self._closed or self.complete)
            if self._closed:
                raise InternalError("this file is gone: its sender has left")

    def close(self) -> None:
        """The file is gone, and whoever waits for it is told. Idempotent."""
        with self._grown:
            self._closed = True
            self._grown.notify_all()
            self._file.close()


def arrives(ask: msgspec.Struct) -> bool:
    """Whether a file of the ask is not complete yet: preparing it takes a thread that can wait."""
    values = (getattr(ask, name) for name in ask.__struct_fields__)
    return any(isinstance(value, ArrivingFile) and not value.complete for value in values)
