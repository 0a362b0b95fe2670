"""One arena per device: every cache class leases superpages from it and cuts its own blocks from them.

A superpage is a highly composite number of bytes, so that nearly any block size rounds up to one of its divisors
with little waste. A block id then addresses the whole arena by itself (`id * stride`), and one strided view per
class serves kernels and index operations alike, wherever its superpages lie.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from polymux.core.errors import InternalError

SUPERPAGE = 2**15 * 3**3 * 5 * 7
"""30,965,760 bytes, about 30 MiB."""

ALIGNMENT = 512
"""Bytes; every block starts at a multiple of it."""


class Tenant(Protocol):
    """A cache class that holds superpages and may have to give some back."""

    run: int
    """Superpages of each of its leases."""

    def spare(self) -> Mapping[int, float]:
        """Leases that no row needs, by first superpage: when their content was last used (monotonic seconds)."""
        ...

    def give_up(self, lease: int) -> None:
        """Forget a spare lease's content and release it."""
        ...


class Arena:
    """`capacity` bytes of one device as superpages. On a CPU untouched pages cost no memory."""

    def __init__(self, capacity: int, device: torch.device, superpage: int = SUPERPAGE) -> None:
        self.superpage = superpage
        self.total = capacity // superpage
        if self.total < 1:
            raise InternalError(f"a cache of {capacity} bytes is less than one superpage of {superpage} bytes")
        self.buffer = torch.empty(self.total * superpage, dtype=torch.uint8, device=device)
        self._free = bytearray(b"\1" * self.total)
        """One byte a superpage: searched and counted at the speed of memory, since rows grow at every step."""
        self._tenants: list[Tenant] = []

    def enroll(self, tenant: Tenant) -> None:
        self._tenants.append(tenant)

    @property
    def free(self) -> int:
        return self._free.count(1)

    def room(self, tenant: Tenant) -> int:
        """Leases the tenant could get now, from what is free or what no row of another tenant needs."""
        others = [other for other in self._tenants if other is not tenant]
        if tenant.run == 1:  # any will do
            return self.free + sum(other.run * len(other.spare()) for other in others)
        needed = self._needed(others)
        return sum(not any(needed[first : first + tenant.run]) for first in self._places(tenant.run))

    def lease(self, run: int = 1) -> int | None:
        """The first of `run` adjacent superpages, aligned to `run`; None when there is no such room.

        When none are free, the tenants give up what lies where the content was idle for longest.
        """
        found = self._find(run)
        if found is None:
            found = self._vacate(run)
        if found is not None:
            self._free[found : found + run] = bytes(run)
            # another class's bytes may read as NaN, and a masked place still takes part as zero times its value
            self.buffer[found * self.superpage : (found + run) * self.superpage].zero_()
        return found

    def release(self, first: int, run: int = 1) -> None:
        again = self._free.find(1, first, first + run)
        if again >= 0:
            raise InternalError(f"superpage {again} was released twice")
        self._free[first : first + run] = b"\1" * run

    def _find(self, run: int) -> int | None:
        """The first of `run` adjacent free superpages, aligned to `run`."""
        wanted = b"\1" * run
        found = self._free.find(wanted)
        while found >= 0 and found % run:
            found = self._free.find(wanted, found + run - found % run)
        return found if found >= 0 else None

    def _places(self, run: int) -> range:
        return range(0, self.total - run + 1, run)

    def _needed(self, tenants: list[Tenant]) -> list[bool]:
        """Per superpage: whether it would still be taken if these tenants gave up all they can."""
        needed = [not free for free in self._free]
        for tenant in tenants:
            for lease in tenant.spare():
                needed[lease : lease + tenant.run] = [False] * tenant.run
        return needed

    def _vacate(self, run: int) -> int | None:
        needed = self._needed(self._tenants)
        used = [0.0] * self.total
        owners: dict[int, tuple[Tenant, int]] = {}
        for tenant in self._tenants:
            for lease, when in tenant.spare().items():
                for index in range(lease, lease + tenant.run):
                    used[index] = when
                    owners[index] = tenant, lease
        places = [first for first in self._places(run) if not any(needed[first : first + run])]
        if not places:
            return None
        best = min(places, key=lambda first: max(used[first : first + run]))
        for index in range(best, best + run):
            if not self._free[index]:
                tenant, lease = owners[index]
                tenant.give_up(lease)
        return best


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
