"""Launches with pieces of prompts as CUDA graphs: one for each of some frames, on the pool of the decode steps.

Up to a thousand tokens a card is through with a launch before the host has launched its kernels one by one. A launch
that fits no recorded frame goes out that way all the same: nobody waits for a recording.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from polymux.core.batch.frame import Frame
from polymux.core.batch.plan import Plan
from polymux.core.compute.device import send
from polymux.core.compute.graphs import Recording, record

Step = Callable[[Frame, Tensor], tuple[Tensor, ...]]
"""(a frame, its buffer (size,) int64) -> tensors of (rows, ...) each, the draws in front."""

FREE = 256
"""Tokens up to which a launch costs little more than one of a single token."""

PADDED = 1.5
"""How many times as many tokens a larger frame may have as are wanted: more would cost more than the host does."""


class MixedGraphs:
    """Graphs of one stage's launches. What a run gives lies in the same tensors for all frames, until the next run."""

    def __init__(
        self,
        step: Step,
        frames: tuple[Sequence[Frame], Sequence[Frame]],
        padding: int,
        device: torch.device,
        pool: tuple[int, int] | None,
    ) -> None:
        """`frames`: those that are recorded first, and the others; in both, what has most rows comes first. `padding`
        is a slot that no row ever has."""
        self._step = step
        self._few, self._others = frames
        self._padding = padding
        most = [*self._few, *self._others]
        self._input = torch.zeros(max(frame.size for frame in most), dtype=torch.int64, device=device)
        self._rows = max(frame.rows for frame in most)
        self._pool = pool
        self._output: tuple[Tensor, ...] = ()
        self._recorded: dict[Frame, Recording] = {}

    def record_few(self) -> None:
        for frame in self._few:
            self._recorded[frame] = self._record(frame)

    def record_more(self) -> bool:
        """One frame more; False when there is nothing left to record."""
        for frame in (*self._few, *self._others):
            if frame not in self._recorded:
                self._recorded[frame] = self._record(frame)
                return True
        return False

    def choose(self, plan: Plan) -> Frame | None:
        """The smallest recorded frame that the plan fits without much padding."""
        wanted = Frame.around(plan)
        most = max(FREE, PADDED * wanted.tokens)
        return min((frame for frame in self._recorded if frame.tokens <= most and frame.holds(wanted)), default=None)

    def run(self, frame: Frame, sent: Tensor) -> tuple[Tensor, ...]:
        """What the step gives for a filled buffer on the device, (rows, ...) each."""
        self._input[: frame.size].copy_(sent)
        self._recorded[frame].replay()
        return tuple(output[: frame.rows] for output in self._output)

    def _record(self, frame: Frame) -> Recording:
        # the warm-up compiles kernels; it must not write, so it runs on padding alone
        self._input[: frame.size].copy_(send(frame.fill([], self._padding), self._input.device))
        return record(partial(self._run, frame), self._pool)

    def _run(self, frame: Frame) -> tuple[Tensor, ...]:
        found = self._step(frame, self._input[: frame.size])
        if not self._output:
            self._output = tuple(each.new_empty(self._rows, *each.shape[1:]) for each in found)
        for output, each in zip(self._output, found, strict=True):
            output[: frame.rows].copy_(each)
        return ()
