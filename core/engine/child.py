"""The process of an engine: begun before it is known what it will serve, since its imports take longest of all."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType

from polymux.core.stopwatch import now

COMMAND = (sys.executable, "-m", "polymux.core.engine")

ENVIRONMENT = {
    # OpenMP's threads spin between two operators by default. An operator of a decode step takes microseconds, and
    # whatever else runs waits for the spinning cores meanwhile: asleep, a busy machine of two cores is 5 to 10 times
    # as fast, a quiet one hardly slower. It is read once, when torch is imported.
    "OMP_WAIT_POLICY": "PASSIVE",
    # Bars of an engine's loading would run over the gateway's own lines.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # What transformers thinks of a configuration that it read without fault is no news to an operator.
    "TRANSFORMERS_VERBOSITY": "error",
}
"""What an engine's environment holds unless the user has set it."""


class Child:
    """A process that waits for its spec on standard input. Whatever happens inside a `with`, it has ended behind it.

    Raises `OSError` when it cannot be started.
    """

    def __init__(self, command: Sequence[str] = COMMAND) -> None:
        self.began = now()
        """When it was started, in seconds of `stopwatch.now`."""
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env={**ENVIRONMENT, **os.environ})
        self._ended: Future[int] = Future()
        self._ended.set_running_or_notify_cancel()  # who stops waiting does not cancel it for the others
        threading.Thread(target=self._watch, name="child", daemon=True).start()

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._ended.result()

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, spec: bytes) -> None:
        """What it is to serve, as one line. One that is dead already is not told; `wait` says how it ended."""
        stdin = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(BrokenPipeError, ValueError):
                stdin.write(spec + b"\n")
                stdin.flush()

    def dismiss(self) -> None:
        """The end of its input ends it, whatever it does."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()

    def kill(self) -> None:
        """Ends it at once, and is no error when it has ended."""
        self._process.kill()

    async def wait(self) -> int:
        """Its exit status, or minus the signal that killed it."""
        return await asyncio.wrap_future(self._ended)

    def _watch(self) -> None:
        status = self._process.wait()
        self.dismiss()
        self._ended.set_result(status)
