"""Decode steps as CUDA graphs: one recorded launch per batch size, on one pool, padded with rows of no length.

Recording takes a moment in which nobody is answered, so it is done ahead: a few sizes before the first request, the
others while nothing runs. A launch whose own size is not recorded yet is padded to a larger one.

A replay reads the rows' slots and positions from fixed buffers; tokens, block tables, temperatures and seeds are on
the device by slot, and the drawn tokens go back there. The host only says which rows take part.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
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


PADDED = 4
"""How many times as large a recorded step may be as the one that is wanted."""

PATIENCE = 32
"""Launches that are padded for want of a size, after which it is recorded even though somebody waits."""


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    outputs: tuple[Tensor, ...]

    def replay(self) -> None:
        self.graph.replay()


def record(step: Callable[[], tuple[Tensor, ...]], pool: tuple[int, int] | None) -> Recording:
    """Record a step, in the memory of `pool`; it runs once before, so that nothing is compiled meanwhile."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        outputs = step()
    return Recording(graph, outputs)


@dataclass(frozen=True)
class _Kind:
    """What sets the steps of one ladder apart from those of another."""

    sharing: bool = False
    rules: Rules = ()


class DecodeGraphs:
    """Graphs of one stage's decode step. `padding` is a slot that no row ever has."""

    def __init__(self, step: Step, most: int, padding: int, device: torch.device) -> None:
        self._step = step
        self._sizes = size_ladder(most)
        self._padding = padding
        self._input = torch.zeros(2 * most + 1, dtype=torch.int64, device=device)
        self.pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._recorded: dict[_Kind, dict[int, Recording]] = {_Kind(): {}}
        self._missed: Counter[tuple[_Kind, int]] = Counter()

    def record_few(self) -> None:
        """Sizes, without rules, between which no launch need be padded much; the largest first: the others then find
        the pool large enough."""
        size, few = self._sizes[-1], [self._sizes[-1]]
        while size > 1:
            size = next(each for each in self._sizes if each * PADDED >= size)
            few.append(size)
        for size in few:
            self._find(_Kind(), size)

    def record_more(self) -> bool:
        """One size more of the kinds that have been wanted; False when there is nothing left to record."""
        for kind, recorded in self._recorded.items():
            for size in reversed(self._sizes):
                if size not in recorded:
                    self._find(kind, size)
                    return True
        return False

    def run(self, slots: list[int], positions: list[int], shared: int, rules: Rules = ()) -> tuple[Tensor, ...]:
        """What the step gives of the rows, valid until the next run.

        `shared` is how many leading tokens all rows have in common; 0: each reads its own. All carry the `rules`;
        every combination is recorded, so they must be few.
        """
        rows = len(slots)
        recorded, size = self._choose(_Kind(shared > 0, rules), rows)
        pad = size - rows
        numbers = [shared, *slots, *[self._padding] * pad, *positions, *[-1] * pad]
        pinned = torch.from_numpy(np.array(numbers, np.int64)).pin_memory()  # torch takes longer to read a list
        self._input[: len(numbers)].copy_(pinned, non_blocking=True)
        recorded.replay()
        return tuple(output[:rows] for output in recorded.outputs)

    def _choose(self, kind: _Kind, rows: int) -> tuple[Recording, int]:
        """The recorded step for so many rows: of their size or a larger one, and each row by itself rather than
        together if only that is recorded."""
        wanted = next(size for size in self._sizes if size >= rows)
        mine = self._recorded.setdefault(kind, {})
        if wanted not in mine and self._missed[kind, wanted] < PATIENCE:
            for each in (kind, _Kind(False, kind.rules)):
                recorded = self._recorded.get(each, {})
                for size in self._sizes:
                    if wanted <= size <= PADDED * rows and size in recorded:
                        self._missed[kind, wanted] += 1
                        return recorded[size], size
        return self._find(kind, wanted), wanted

    def _find(self, kind: _Kind, size: int) -> Recording:
        recorded = self._recorded.setdefault(kind, {})
        if size not in recorded:
            recorded[size] = self._record(kind, size)
        return recorded[size]

    def _record(self, kind: _Kind, size: int) -> Recording:
        # the warm-up compiles kernels; it must not write, so it runs on padding alone
        shared, slots, positions = self._input[: 2 * size + 1].split([1, size, size])
        shared.zero_()
        slots.fill_(self._padding)
        positions.fill_(-1)
        step = partial(self._step, slots, positions, shared if kind.sharing else None, kind.rules)
        return record(step, self.pool)
