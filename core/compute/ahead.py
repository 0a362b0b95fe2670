"""What a run needs, made ready before it: kernels that a device's compiler has to make."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch


def compile_ahead(run: Callable[[], object], device: torch.device) -> None:
    """On a card: go through `run` without launching our kernels, and compile all that it would launch, side by side.

    Else nothing is done, since nothing has to be compiled. What `run` computes means nothing and must be forgotten.
    """
    if device.type != "cuda" or find_spec("triton") is None:
        return
    from polymux.core.compute.triton.ahead import compiling_ahead

    with compiling_ahead(device):
        run()
