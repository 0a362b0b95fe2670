"""A pass over tensors as a CUDA graph: recorded for each combination of shapes, replayed with new values.

Worth it where a pass is many short kernels and the host cannot launch them as fast as they run. A recording keeps the
memory of its pass, so only the last few combinations are kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

KEPT = 8
"""Recordings that stay."""

SEEN = 3
"""Passes of one combination before it is recorded: a shape that comes once is not worth it."""


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    inputs: list[Tensor]
    output: Tensor


class Replay:
    """`run(key, inputs)` gives what `step(inputs)` gives; valid until the next run."""

    def __init__(self, step: Callable[[Hashable, Sequence[Tensor]], Tensor]) -> None:
        self._step = step
        self._seen: dict[Hashable, int] = {}
        self._recorded: OrderedDict[Hashable, _Recorded] = OrderedDict()

    def run(self, key: Hashable, inputs: Sequence[Tensor]) -> Tensor:
        """`key` says all that the step does by, besides the inputs' values."""
        place = (key, *(each.shape for each in inputs))
        recorded = self._recorded.get(place)
        if recorded is None:
            self._seen[place] = self._seen.get(place, 0) + 1
            if self._seen[place] <= SEEN:
                return self._step(key, inputs)
            recorded = self._recorded[place] = self._record(key, inputs)
            if len(self._recorded) > KEPT:
                forgotten, _ = self._recorded.popitem(last=False)
                self._seen.pop(forgotten)
        self._recorded.move_to_end(place)
        for own, given in zip(recorded.inputs, inputs):
            own.copy_(given)
        recorded.graph.replay()
        return recorded.output

    def _record(self, key: Hashable, inputs: Sequence[Tensor]) -> _Recorded:
        own = [each.clone() for each in inputs]
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._step(key, own)  # what is made once (tables, plans) is made outside
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self._step(key, own)
        return _Recorded(graph, own, output)
