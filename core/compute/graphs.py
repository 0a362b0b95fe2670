"""Decode steps as CUDA graphs: one recorded launch per batch size, on one pool, padded with rows of no length.

A replay reads the rows' slots and positions from fixed buffers; tokens, block tables, temperatures and seeds are on
the device by slot, and the drawn tokens go back there. The host only says which rows take part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polymux.core.compute.rules import LogitRule

Rules = tuple[LogitRule, ...]

Step = Callable[[Tensor, Tensor, Tensor | None, Rules], tuple[Tensor, ...]]
"""(slots (B,), positions (B,), shared prefix (1,) or None, the rules of every row) -> logits (B, vocabulary),
tokens (B,), finite (B,) and, with rules, the tokens' logprobs (B,). Position -1 marks padding."""


def size_ladder(most: int) -> list[int]:
    """Batch sizes worth a graph: dense where a padded row costs much, sparse where it costs little."""
    ladder = [1, 2, 4, 8, *range(16, 64, 8), *range(64, 256, 16), *range(256, 1024, 32)]
    return [size for size in ladder if size < most] + [most]


@dataclass
class _Recorded:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]


class DecodeGraphs:
    """Graphs of one stage's decode step, recorded when their size is first needed, or all at once.

    `padding` is a slot that no row ever has.
    """

    def __init__(self, step: Step, most: int, padding: int, device: torch.device) -> None:
        self._step = step
        self._sizes = size_ladder(most)
        self._padding = padding
        self._input = torch.zeros(2 * most + 1, dtype=torch.int64, device=device)
        self._pool = torch.cuda.graph_pool_handle()
        self._recorded: dict[tuple[int, bool, Rules], _Recorded] = {}

    def record(self, most: int) -> None:
        """Sizes up to `most`, without rules, now; the largest first: the others then find the pool large enough."""
        for size in reversed([size for size in self._sizes if size <= most]):
            self._find(size, False, ())

    def run(self, slots: list[int], positions: list[int], shared: int, rules: Rules = ()) -> tuple[Tensor, ...]:
        """What the step gives of the rows, valid until the next run.

        `shared` is how many leading tokens all rows have in common; 0: each reads its own. All carry the `rules`;
        every combination is recorded, so they must be few.
        """
        rows = len(slots)
        size = next(size for size in self._sizes if size >= rows)
        pad = size - rows
        recorded = self._find(size, shared > 0, rules)
        numbers = [shared, *slots, *[self._padding] * pad, *positions, *[-1] * pad]
        pinned = torch.tensor(numbers, dtype=torch.int64).pin_memory()
        self._input[: len(numbers)].copy_(pinned, non_blocking=True)
        recorded.graph.replay()
        return tuple(output[:rows] for output in recorded.outputs)

    def _find(self, size: int, sharing: bool, rules: Rules) -> _Recorded:
        key = (size, sharing, rules)
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._recorded[key] = self._record(*key)
        return recorded

    def _record(self, size: int, sharing: bool, rules: Rules) -> _Recorded:
        # the warm-up compiles kernels; it must not write, so it runs on padding alone
        shared, slots, positions = self._input[: 2 * size + 1].split([1, size, size])
        shared.zero_()
        slots.fill_(self._padding)
        positions.fill_(-1)
        step = partial(self._step, slots, positions, shared if sharing else None, rules)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step()
        return _Recorded(graph, outputs)
