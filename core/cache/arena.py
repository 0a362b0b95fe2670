"""One arena per device: every cache class leases superpages from it and cuts its own blocks from them.

A superpage is a highly composite number of bytes, so that nearly any block size rounds up to one of its divisors
with little waste. A block id then addresses the whole arena by itself (`id * stride`), and one strided view per
class serves kernels and index operations alike, wherever its superpages lie.
"""

from __future__ import annotations

from typing import Protocol

import torch

from polymux.core.errors import InternalError

SUPERPAGE = 2**15 * 3**3 * 5 * 7
"""30,965,760 bytes, about 30 MiB."""

ALIGNMENT = 512
"""Bytes; every block starts at a multiple of it."""


class Tenant(Protocol):
    """A cache class that holds superpages and may have to give some back."""

    def reclaim(self, superpages: int) -> int:
        """Release up to this many superpages that no row needs; return how many were released."""
        ...

    def last_used(self) -> float:
        """When the least recently used reclaimable content was last used (monotonic seconds)."""
        ...


class Arena:
    """`capacity` bytes of one device as superpages. On a CPU untouched pages cost no memory."""

    def __init__(self, capacity: int, device: torch.device, superpage: int = SUPERPAGE) -> None:
        self.superpage = superpage
        self.total = capacity // superpage
        if self.total < 1:
            raise InternalError(f"a cache of {capacity} bytes is less than one superpage of {superpage} bytes")
        self.buffer = torch.empty(self.total * superpage, dtype=torch.uint8, device=device)
        self._free = [True] * self.total
        self._tenants: list[Tenant] = []

    def enroll(self, tenant: Tenant) -> None:
        self._tenants.append(tenant)

    @property
    def free(self) -> int:
        return sum(self._free)

    def lease(self, run: int = 1) -> int | None:
        """The first of `run` adjacent superpages, aligned to `run`; None when there is no such room.

        Asks the tenants, the longest idle content first, to give back superpages when none are free.
        """
        found = self._find(run)
        if found is None:
            for tenant in sorted(self._tenants, key=lambda tenant: tenant.last_used()):
                if tenant.reclaim(run) and (found := self._find(run)) is not None:
                    break
        if found is not None:
            for index in range(found, found + run):
                self._free[index] = False
            # another class's bytes may read as NaN, and a masked place still takes part as zero times its value
            self.buffer[found * self.superpage : (found + run) * self.superpage].zero_()
        return found

    def release(self, first: int, run: int = 1) -> None:
        for index in range(first, first + run):
            if self._free[index]:
                raise InternalError(f"superpage {index} was released twice")
            self._free[index] = True

    def _find(self, run: int) -> int | None:
        for first in range(0, self.total - run + 1, run):
            if all(self._free[first : first + run]):
                return first
        return None


def fit_stride(block_bytes: int, superpage: int) -> tuple[int, int]:
    """(stride, run): the bytes a block occupies and the superpages one lease takes.

    A block of up to a superpage gets the smallest aligned divisor that holds it; a larger one gets whole superpages.
    """
    if block_bytes > superpage:
        run = -(-block_bytes // superpage)
        return run * superpage, run
    for count in range(superpage // block_bytes, 0, -1):
        if superpage % count == 0 and (superpage // count) % ALIGNMENT == 0:
            return superpage // count, 1
    return superpage, 1
