"""Step caches: which denoising steps of one (request, branch) run in full, and what the others reuse.

Consecutive steps resemble each other, so a step may add the residual that an earlier step saved in place of running
most blocks. Some rules know their schedule beforehand; others measure how far the input has moved, and that number
must come to the host before the rest of the step can start.

    rule         decides by                                 a skipped step reuses
    FirstBlock   change of the first block's residual       what the other blocks added       (ParaAttention)
    TeaCache     accumulated change of the modulated input  what all blocks added             (arXiv 2411.19108)
    MagCache     calibrated magnitudes of residuals         what all blocks added             (arXiv 2506.09045)
    StepProbe    computes all, measures for Mag, TeaCache   nothing
    StepMask     a list                                     what all blocks added
    DeepCache    the step's number                          what the depths of a UNet added   (arXiv 2312.00858)
    TaylorSeer   the step's number                          the outputs, extrapolated         (arXiv 2503.06923)

Rules are plain data, shared by requests; a `StepCache` is the state of one row.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


class Reuse(enum.Enum):
    """Where a skipped step takes its output from."""

    BODY = "body"
    """The first block runs; what the others added is reused."""
    BLOCKS = "blocks"
    """No block runs; what all of them added is reused."""
    OUTPUT = "output"
    """Nothing runs; the model's outputs are extrapolated."""


@dataclass(frozen=True, kw_only=True)
class StepRule:
    """How a row skips steps. The first step is always computed."""

    warmup: int = 1
    """First steps that are always computed."""
    tail: int = 1
    """Last steps that are always computed."""
    max_skips: int | None = None
    """Consecutive steps that may be skipped at most."""

    reuse = Reuse.BLOCKS
    planes = 1
    """Tensors of (tokens, dim) that a row keeps."""

    def plan(self, steps: int) -> list[bool] | None:
        """Per step, whether it is computed; None when that depends on what is measured."""
        return None

    def guarded(self, step: int, steps: int) -> bool:
        """Whether the step is computed in any case."""
        return step < max(self.warmup, 1) or step >= steps - self.tail


class AdaptiveRule(StepRule, ABC):
    """Decides by the relative change of a signal, mean |now - then| / mean |then| over the row, in float32."""

    planes = 2

    @abstractmethod
    def accumulate(self, sum: float, distance: float) -> float:
        """The quantity that is compared with the threshold: from its value after the last step, and the change."""

    threshold: float
    """Of the distance that may add up before a step is computed."""


@dataclass(frozen=True, kw_only=True)
class FirstBlock(AdaptiveRule):
    """Skip while the first block's residual is within `threshold` of the one of the last computed step."""

    threshold: float = 0.08

    reuse = Reuse.BODY

    def accumulate(self, sum: float, distance: float) -> float:
        return distance


@dataclass(frozen=True, kw_only=True)
class TeaCache(AdaptiveRule):
    """Skip while the accumulated change of the modulated input, mapped by a polynomial, stays below `threshold`."""

    threshold: float = 0.25
    polynomial: tuple[float, ...] = (1.0, 0.0)
    """Coefficients, highest power first: measured per model family."""

    def accumulate(self, sum: float, distance: float) -> float:
        return sum + float(np.polyval(self.polynomial, distance))


@dataclass(frozen=True, kw_only=True)
class StepMask(StepRule):
    """Computes the steps that are True; a mask for another number of steps is stretched to the nearest ones."""

    mask: tuple[bool, ...]

    def plan(self, steps: int) -> list[bool]:
        wanted = [self.mask[place] for place in _nearest(len(self.mask), steps)]
        return _guard(self, wanted)


@dataclass(frozen=True, kw_only=True)
class MagCache(StepRule):
    """Skip while the error that the calibrated magnitude ratios predict stays within `threshold`."""

    ratios: tuple[float, ...]
    """Per step, how large the residual is relative to the step's before: a property of the checkpoint."""
    threshold: float = 0.06
    retention: float = 0.2
    """Share of the steps at the start that are computed."""
    max_skips: int | None = 3

    def plan(self, steps: int) -> list[bool]:
        one = np.float32(1.0)
        ratios = np.asarray(self.ratios, np.float32)[_nearest(len(self.ratios), steps)]
        kept = max(int(self.retention * steps + 0.5), 1)
        computed: list[bool] = []
        ratio, error, skips = one, np.float32(0.0), 0
        for step in range(steps):
            if step >= kept:
                ratio = ratio * ratios[step]
                error = error + abs(one - ratio)
                skips += 1
            full = (
                step < kept
                or bool(error > self.threshold)
                or (self.max_skips is not None and skips > self.max_skips)
                or self.guarded(step, steps)
            )
            if full:
                ratio, error, skips = one, np.float32(0.0), 0
            computed.append(full)
        return computed


@dataclass(frozen=True, kw_only=True)
class StepProbe(StepRule):
    """Computes every step, and measures what `MagCache` and `TeaCache` are to be given for this checkpoint."""

    planes = 2

    def plan(self, steps: int) -> list[bool]:
        return [True] * steps


@dataclass(frozen=True, kw_only=True)
class DeepCache(StepRule):
    """Compute every `interval`-th step, and reuse its residual until the next."""

    interval: int = 2

    def plan(self, steps: int) -> list[bool]:
        return _guard(self, [step % self.interval == 0 for step in range(steps)])


@dataclass(frozen=True, kw_only=True)
class TaylorSeer(StepRule):
    """Compute every `interval`-th step after the warm-up, and extrapolate the model's output between them."""

    interval: int = 5
    order: int = 1
    warmup: int = 3

    reuse = Reuse.OUTPUT
    planes = 0

    def plan(self, steps: int) -> list[bool]:
        return _guard(self, [(step - self.warmup - 1) % self.interval == 0 for step in range(steps)])


class StepCache:
    """The decisions for one (request, branch). `computed` holds them by step; what is saved lies on the device."""

    def __init__(self, rule: StepRule, steps: int) -> None:
        self.rule = rule
        self.steps = steps
        self.computed: dict[int, bool] = {}
        self._plan = rule.plan(steps)
        self._sum = 0.0
        self._skips = 0

    def foresee(self, step: int) -> bool | None:
        """Whether the step is computed; None when a measurement must decide. A decision stands when asked again."""
        if step in self.computed:
            return self.computed[step]
        rule = self.rule
        if self._plan is not None:
            return self._record(step, self._plan[step])
        if rule.guarded(step, self.steps) or (rule.max_skips is not None and self._skips >= rule.max_skips):
            return self._record(step, True)
        return None

    def decide(self, step: int, distance: float) -> bool:
        """Whether the step is computed, by how far the signal has moved. What is not a number computes."""
        rule = self.rule
        if not isinstance(rule, AdaptiveRule):
            raise TypeError(f"{type(rule).__name__} decides nothing by distance")
        self._sum = rule.accumulate(self._sum, distance)
        return self._record(step, not self._sum <= rule.threshold)

    def _record(self, step: int, computed: bool) -> bool:
        self.computed[step] = computed
        self._skips = 0 if computed else self._skips + 1
        if computed:
            self._sum = 0.0
        return computed


def _guard(rule: StepRule, wanted: Sequence[bool]) -> list[bool]:
    """The wanted schedule with the rule's guards in force."""
    computed: list[bool] = []
    skips = 0
    for step, full in enumerate(wanted):
        capped = rule.max_skips is not None and skips >= rule.max_skips
        computed.append(full or capped or rule.guarded(step, len(wanted)))
        skips = 0 if computed[-1] else skips + 1
    return computed


def _nearest(length: int, steps: int) -> list[int]:
    """Places in a list of `length` that stand for `steps` steps, the nearest ones; ties go to the even place."""
    if steps == 1:
        return [length - 1]
    scale = np.float32((length - 1) / (steps - 1))
    return [int(np.round(np.float32(step) * scale)) for step in range(steps)]
