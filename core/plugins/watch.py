"""Calling a stranger's code at start-up: it may raise, hang, print or take memory, and costs only itself.

Each call runs on a thread of its own, which is left behind when it does not come back. What it prints goes to
nobody's data but is told; what it cost is kept (`Cost`), so that `polymux plugins --trace` can name who is slow.
"""

from __future__ import annotations

import contextlib
import io
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polymux.core.errors import PluginError

PATIENCE = 60.0
"""Seconds that an import or a hook may take unless the settings say otherwise."""

SLOW_SECONDS = 1.0
LARGE_MIB = 100.0
PAGE_MIB = 4096 / 2**20


@dataclass(frozen=True)
class Cost:
    """What one call took: `ms` on the clock, and `mib` by which the process has grown meanwhile."""

    ms: float
    mib: float
    printed: str = ""

    def warn(self, what: str, *, free: bool = False) -> list[str]:
        """What a person should hear about it; `free`: time and memory may be taken."""
        notes = []
        if self.ms > SLOW_SECONDS * 1e3 and not free:
            notes.append(f"{what} is slow: {self.ms:,.0f} ms; move what is heavy into what the hook returns")
        if self.mib > LARGE_MIB and not free:
            notes.append(f"{what} takes {self.mib:,.0f} MiB of memory; load it when the model is loaded")
        if self.printed:
            notes.append(f"{what} prints to standard output: {self.printed[:80]!r}; use logging")
        return notes


@dataclass(frozen=True)
class Outcome:
    """Either a value or the error that was raised."""

    value: Any
    error: BaseException | None
    cost: Cost


def call_watched(work: Callable[[], Any], patience: float | None = PATIENCE) -> Outcome:
    """Run `work` for at most `patience` seconds (None: for as long as it takes).

    Raises nothing but `KeyboardInterrupt`.
    """
    found: list[Any] = [None]
    errors: list[BaseException] = []

    def run() -> None:
        try:
            found[0] = work()
        except BaseException as error:
            errors.append(error)

    printed = io.StringIO()
    memory, began = read_memory(), time.perf_counter()
    thread = threading.Thread(target=run, name="plugin", daemon=True)
    with contextlib.redirect_stdout(printed):
        thread.start()
        thread.join(patience)
    cost = Cost(
        round((time.perf_counter() - began) * 1e3, 3), round(read_memory() - memory, 3), printed.getvalue().strip()
    )
    if thread.is_alive():
        return Outcome(None, PluginError(f"it did not come back within {patience:g} seconds"), cost)
    return Outcome(found[0], errors[0] if errors else None, cost)


def read_memory() -> float:
    """MiB that this process holds; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_MIB
    except (OSError, ValueError, IndexError):
        return 0.0
