"""An engine loop without a model, for tests of everything around one; runnable as an engine process.

The work says what happens: count to `n` by one a step, die, or echo an array. `COMMAND` runs it as an engine process.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from typing import Any

import msgspec
import numpy as np

from polymux.core.engine.process import main
from polymux.core.engine.spec import EngineSpec
from polymux.core.engine.wire import discard, pack, unpack
from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.vocabulary import Cancel, Command, Ended, Failed, Output, Post, Ready, Receipt, Report, Submit, Tokens

COMMAND = (sys.executable, "-m", "polymux.core.testing.counting")


class Count(msgspec.Struct, omit_defaults=True):
    """Emit the tokens 0 .. n-1, one a step; then do as told."""

    n: int
    pause: float = 0.0
    die: bool = False
    fail: bool = False
    wait: int = 0
    """End only after so many posts, each echoed as a token."""


class Echo(msgspec.Struct):
    array: np.ndarray


class CountingLoop:
    """Same interface as `core.engine.loop.Loop`; every running job advances by one unit a step."""

    def __init__(self, site: Any = None, programs: Any = None) -> None:
        self.running: dict[str, tuple[Count, int]] = {}
        self.posts: dict[str, deque[Count]] = {}
        self.reports: list[Report] = []
        self.cancelled: list[str] = []
        self.stopped: list[tuple[str, int | None]] = []
        self.submitted = 0
        self.closed = False

    def handle(self, command: Command) -> None:
        match command:
            case Submit(job=job, task=task, work=work):
                self.submitted += 1
                if task == "echo":
                    echo = unpack(work, Echo)
                    self.reports += [Output(job, "echo", pack(echo)), Ended(job, Receipt())]
                else:
                    self.running[job] = (unpack(work, Count), 0)
                    self.posts[job] = deque()
            case Cancel(job=job, branch=None):
                self.running.pop(job, None)
                self.cancelled.append(job)
            case Cancel(job=job, branch=branch):
                self.stopped.append((job, branch))
            case Post(job=job, body=body):
                if job in self.running:
                    self.posts[job].append(unpack(body, Count))
                else:
                    discard(body)

    def step(self) -> bool:
        for job, (work, done) in list(self.running.items()):
            time.sleep(work.pause)
            if done < work.n:
                self.reports.append(Tokens(job, 0, [done]))
                self.running[job] = (work, done + 1)
            elif work.die:
                os.kill(os.getpid(), signal.SIGKILL)
            elif work.fail:
                self.reports.append(Failed(job, InvalidRequest("told to fail", param="work").to_wire()))
                del self.running[job]
            elif work.wait:
                if self.posts[job]:
                    self.reports.append(Tokens(job, 0, [self.posts[job].popleft().n]))
                    work.wait -= 1
            else:
                self.reports.append(Ended(job, Receipt(output_units=done)))
                del self.running[job]
        return any(work.wait == 0 or self.posts[job] for job, (work, _) in self.running.items())

    def take_reports(self) -> list[Report]:
        reports, self.reports = self.reports, []
        return reports

    def stats(self) -> dict[str, float]:
        return {"running": float(len(self.running)), "submitted": float(self.submitted)}

    def close(self) -> None:
        self.closed = True


def load(spec: EngineSpec) -> tuple[CountingLoop, Ready]:
    """`settings` choose how loading goes: fine, slowly, not at all, or fatally."""
    time.sleep(spec.settings.get("slow", 0))
    if spec.settings.get("broken"):
        raise ModelError("model counter: weights.safetensors is missing")
    if spec.settings.get("bug"):
        raise KeyError("layer.0")
    if spec.settings.get("fatal"):
        os.kill(os.getpid(), signal.SIGKILL)
    return CountingLoop(), Ready({"counter": {"dtype": "int"}})


if __name__ == "__main__":
    main(load)
