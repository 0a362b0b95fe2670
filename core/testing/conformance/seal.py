"""No network and no unpickling while a plugin is checked: both are refused, and remembered."""

from __future__ import annotations

import importlib
import pickle
import socket
from typing import Any

LOCAL = ("127.0.0.1", "::1", "localhost")


class Seal:
    """`attempts` says what was tried: `connect to ...`, `torch.load`, `pickle.load`."""

    def __init__(self) -> None:
        self.attempts: list[str] = []
        self._originals: list[tuple[Any, str, Any]] = []

    def close(self, *, torch: bool) -> None:
        """From now on. `torch`: it will be imported anyway, and is watched too."""
        connect = socket.socket.connect

        def guarded(own: socket.socket, address: Any) -> Any:
            if own.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in LOCAL:
                self.attempts.append(f"connect to {address[0]}")
                raise OSError(f"the check has no network: {address[0]}")
            return connect(own, address)

        self._replace(socket.socket, "connect", guarded)
        self._replace(pickle, "load", self._refuse("pickle.load"))
        if torch:
            self._replace(importlib.import_module("torch"), "load", self._refuse("torch.load"))

    def open(self) -> None:
        """Everything is as it was."""
        for owner, name, original in reversed(self._originals):
            setattr(owner, name, original)
        self._originals.clear()

    def _refuse(self, what: str) -> Any:
        def refuse(*arguments: Any, **keywords: Any) -> Any:
            self.attempts.append(what)
            raise RuntimeError(f"{what} runs code out of a file: read safetensors")

        return refuse

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        self._originals.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)
