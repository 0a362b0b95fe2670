"""What a user is told when something breaks under a request: what they can do about it, and nothing of our insides."""

from __future__ import annotations

import torch

from polymux.core.errors import InternalError, Overloaded, PolymuxError


def explain_fault(error: BaseException) -> PolymuxError:
    """An error as it is, running out of memory as `Overloaded`, everything else as `InternalError`."""
    if isinstance(error, PolymuxError):
        return error
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return Overloaded("the device ran out of memory for this request; make it smaller")
    return InternalError(f"the model failed on this request ({type(error).__name__})")
