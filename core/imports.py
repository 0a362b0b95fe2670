"""Large imports: thousands of modules that stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Inside, the collector rests: it would walk all that has been imported again and again, a fifth of the time of
    importing torch. What is there at the end stays, and is never walked."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
