"""Forms of one kernel, one after the other on the same tensors: how long each takes and how far it is from exact."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TIMES, LAUNCHES = 3, 8


def clock(run: Callable[[], Tensor]) -> float:
    """Milliseconds of one launch of several in a row, the host's own time left out where it can be recorded."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            run()
    graph.replay()
    best = float("inf")
    for _ in range(TIMES):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) / LAUNCHES)
    return best


class Trials:
    """Prints a JSON line for each form, and appends it to a file."""

    def __init__(self, out: Path | None, tiny: bool, limit: float) -> None:
        """`tiny`: nothing is clocked. `limit`: seconds after which nothing more is begun."""
        self._out = out
        self._tiny = tiny
        self._limit = limit
        self._began = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._began

    def tell(self, **line: Any) -> None:
        text = json.dumps(line)
        print(text, flush=True)
        if self._out is not None:
            with self._out.open("a") as file:
                file.write(text + "\n")

    def run(
        self,
        case: str,
        forms: Iterable[tuple[str, Callable[[], Tensor]]],
        exact: Tensor,
        grade: Callable[[float], dict[str, float]],
    ) -> None:
        """`grade`: what a form's milliseconds are told as. A form that fails says so and the others go on."""
        for name, form in forms:
            if self.seconds > self._limit:
                self.tell(case=case, form=name, failed="no time left")
                continue
            line: dict[str, Any] = {}
            try:
                line["error"] = float((form().float() - exact).norm() / exact.norm())
                if not self._tiny:
                    line |= grade(clock(form))
            except Exception as error:
                line["failed"] = f"{type(error).__name__}: {str(error)[:200]}"
            self.tell(case=case, form=name, **line)
