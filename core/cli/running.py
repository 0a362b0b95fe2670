"""One answer of a service for a command that ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from polymux.core.service import Service

T = TypeVar("T")


def run_once(service: Service, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; the service is stopped then, whatever happened. Ctrl-C cancels the work."""
    with asyncio.Runner() as runner:
        try:
            return runner.run(work)
        finally:
            runner.run(service.stop())
