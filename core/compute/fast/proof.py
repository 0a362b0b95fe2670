"""Proving that a rebuilt model computes what its reference does, as closely as its number format allows.

Two implementations in bfloat16 round differently, and a deep model makes much of that: a fixed tolerance would refuse
correct ones. So where they differ, the reference is run once more in float32, and the rebuilt one may be no further
from that than the reference itself, but for `SLACK`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from polymux.core.compute.fast.structure import Unfamiliar

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Differences that need no further question: relative to the largest magnitude."""

SLACK = 2.0
"""How many times the reference's own rounding error the rebuilt model's may be."""

COARSEST = 0.5
"""Relative error beyond which nothing is proven, whatever the reference's own is."""


def prove(model: nn.Module, run: Callable[[], Tensor], expected: Tensor, found: Tensor) -> None:
    """Raises `Unfamiliar` unless `found` is as good as `expected`; `run` computes the latter again with `model`.

    Both are of one shape, float32. `model` is the reference; its weights are as they were when this returns.
    """
    dtype = next(model.parameters()).dtype
    difference = ((found - expected).abs().max() / expected.abs().max()).item()
    if difference <= TOLERANCE[dtype]:
        return
    if dtype == torch.float32 or difference != difference:
        raise Unfamiliar(f"put together from its parts it computes something else (off by {difference:.2g})")
    try:
        with widened(model), torch.inference_mode():
            exact = run().float()
    except RuntimeError as error:
        raise Unfamiliar(f"it is off by {difference:.2g} and cannot be tried in float32: {error}") from error
    error, own = (((each - exact).norm() / exact.norm()).item() for each in (found, expected))
    if not error <= min(SLACK * own, COARSEST):
        raise Unfamiliar(
            f"put together from its parts it computes something else (off by {error:.2g} from float32, "
            f"the reference by {own:.2g})"
        )


@contextmanager
def widened(model: nn.Module) -> Iterator[None]:
    """`model` computes in float32 meanwhile. A module's weights are converted as it runs, so that no second copy of
    the model is ever there."""
    kept: dict[nn.Module, dict[str, nn.Parameter | None]] = {}

    def widen(module: nn.Module, inputs: object) -> None:
        kept[module] = dict(module._parameters)
        for name, weight in kept[module].items():
            if weight is not None:
                module._parameters[name] = nn.Parameter(weight.float(), requires_grad=False)

    def restore(module: nn.Module, inputs: object, output: object) -> None:
        module._parameters.update(kept.pop(module))

    owners = [module for module in model.modules() if module._parameters]
    hooks = [module.register_forward_pre_hook(widen) for module in owners]
    hooks += [module.register_forward_hook(restore, always_call=True) for module in owners]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
