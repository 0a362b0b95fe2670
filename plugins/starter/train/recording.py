"""Steps of learning that a GPU launches as one graph: these models are so small that launching their kernels one by one
takes longer than running them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

UNRECORDED = 5
"""Steps that a GPU takes kernel by kernel before they are recorded: libraries and optimizer set themselves up."""

Learn = Callable[..., Tensor]
"""A step from tensors to its loss; it reads nothing on the host."""


class Recorded:
    """A step that launches itself as one graph, after a few as it was written. It is recorded anew for other shapes."""

    def __init__(self, learn: Learn) -> None:
        self._learn = learn
        self._aside = torch.cuda.Stream()  # what is recorded may not have run on the stream that all use
        self._graph: torch.cuda.CUDAGraph | None = None
        self._kept: tuple[Tensor, ...] = ()
        self._before = 0
        self._loss: Tensor

    def __call__(self, *lesson: Tensor) -> Tensor:
        if [each.shape for each in lesson] != [each.shape for each in self._kept]:
            self._graph, self._before = None, 0
            self._kept = tuple(each.clone() for each in lesson)
        for kept, given in zip(self._kept, lesson, strict=True):
            kept.copy_(given)
        if self._before < UNRECORDED:
            self._before += 1
            self._aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._aside):
                loss = self._learn(*self._kept)
            torch.cuda.current_stream().wait_stream(self._aside)
            return loss
        if self._graph is None:
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                self._loss = self._learn(*self._kept)
        self._graph.replay()
        return self._loss


def set_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Where the rate is a tensor, in place: a recorded step reads it there."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
