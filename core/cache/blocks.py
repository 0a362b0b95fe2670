"""A cache class: equal blocks cut from leased superpages, reference counted, with content that may outlive its rows.

    free      belongs to nobody, content worthless
    held      one or more rows refer to it
    idle      no row refers to it, but its content is indexed (a prefix): reused on a hit, evicted when room is short

A paged KV cache, a cross-attention slab and a recurrent state are all classes that differ in the block's shape.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

from polymux.core.cache.arena import ALIGNMENT, Arena, fit_stride
from polymux.core.errors import InternalError


@dataclass(frozen=True)
class CacheSpec:
    """The shape of one block. `units` is what a block holds along the sequence: tokens, frames; 1 for a state."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    units: int

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def paged_kv(name: str, *, layers: int, heads: int, dim: int, dtype: torch.dtype, block: int) -> CacheSpec:
    """Keys and values of `block` tokens for all layers: (layers, 2, block, heads, dim)."""
    return CacheSpec(name, (layers, 2, block, heads, dim), dtype, block)


def join_specs(name: str, specs: Sequence[CacheSpec]) -> CacheSpec:
    """A class whose blocks hold one of each of `specs`, in this order; see `view_parts`."""
    return CacheSpec(name, (_offsets(specs)[-1],), torch.uint8, specs[0].units)


def view_blocks(arena: Arena, spec: CacheSpec) -> torch.Tensor:
    """The whole arena as blocks of one class, (blocks, *shape), to be indexed with ids that its pool handed out."""
    return view_parts(arena, [spec])[0]


def view_parts(arena: Arena, specs: Sequence[CacheSpec]) -> list[torch.Tensor]:
    """The same for a class that `join_specs` made: each part's own view, all with the ids of the joined blocks."""
    offsets = _offsets(specs)
    stride, run = fit_stride(offsets[-1] if len(specs) > 1 else specs[0].nbytes, arena.superpage)
    count = (arena.total // run) * max(1, arena.superpage // stride)
    views = []
    for spec, offset in zip(specs, offsets):
        inner = [prod(spec.shape[axis + 1 :]) for axis in range(len(spec.shape))]
        strides = (stride // spec.dtype.itemsize, *inner)
        flat = arena.buffer.view(spec.dtype)
        views.append(flat.as_strided((count, *spec.shape), strides, offset // spec.dtype.itemsize))
    return views


def _offsets(specs: Sequence[CacheSpec]) -> list[int]:
    """Where each part begins in a joined block, in bytes, and where the last one ends."""
    offsets = [0]
    for spec in specs:
        offsets.append(offsets[-1] + -(-spec.nbytes // ALIGNMENT) * ALIGNMENT)
    return offsets


class BlockPool:
    """Allocates the blocks of one class. `evicted` is told of every idle block whose content is lost."""

    def __init__(self, arena: Arena, spec: CacheSpec, evicted: Callable[[int], None] | None = None) -> None:
        self.spec = spec
        self.stride, self.run = fit_stride(spec.nbytes, arena.superpage)
        self.per_lease = max(1, arena.superpage // self.stride)
        self._arena = arena
        self._evicted = evicted
        self._free: list[int] = []
        self._refs: dict[int, int] = {}
        self._idle: OrderedDict[int, float] = OrderedDict()
        self._held: dict[int, int] = {}
        """Per lease, by its first superpage: how many of its blocks rows refer to."""
        self._used: dict[int, float] = {}
        """Per lease: when content in it last became idle."""
        self._tainted: set[int] = set()
        self._view = view_blocks(arena, spec)
        arena.enroll(self)

    # ---- counting ----

    @property
    def capacity(self) -> int:
        """Blocks this class could hold if it had the arena for itself."""
        return (self._arena.total // self.run) * self.per_lease

    def has_room(self, count: int) -> bool:
        """Whether so many blocks could be handed out now without taking any from a row."""
        missing = count - len(self._free) - len(self._idle)
        return missing <= 0 or missing <= self._arena.room(self) * self.per_lease

    def count_idle(self, blocks: Sequence[int]) -> int:
        """How many of the blocks no row refers to."""
        return sum(map(self._idle.__contains__, blocks))

    @property
    def held(self) -> int:
        return len(self._refs)

    @property
    def idle(self) -> int:
        return len(self._idle)

    # ---- allocate / hold / release ----

    def allocate(self, count: int) -> list[int] | None:
        """`count` blocks with one reference each, or None (and nothing taken) when there is no room."""
        if not self.has_room(count):
            return None
        taken: list[int] = []
        while len(taken) < count:
            if self._free:
                block = self._free.pop()
            elif self._grow():
                continue
            else:
                block, _ = self._idle.popitem(last=False)
                self._forget(block)
            # at once: growing asks every class to give up leases without rows, this one too
            self._refer(block)
            taken.append(block)
        return taken

    def hold(self, block: int) -> None:
        """One more reference to a held or idle block."""
        if block in self._refs:
            self._refs[block] += 1
            return
        if self._idle.pop(block, None) is None:
            raise InternalError(f"block {block} of {self.spec.name} is neither held nor idle")
        self._refer(block)

    def release(self, block: int, *, keep: bool) -> None:
        """One reference less. With `keep`, the last one leaves the block idle (its content is indexed)."""
        refs = self._refs.get(block)
        if refs is None:
            raise InternalError(f"block {block} of {self.spec.name} was released twice")
        if refs > 1:
            self._refs[block] = refs - 1
            return
        del self._refs[block]
        lease = self._lease(block)
        self._held[lease] -= 1
        if block in self._tainted:
            self._tainted.discard(block)
            self._view[block].zero_()
        if keep:
            self._idle[block] = self._used[lease] = time.monotonic()
        else:
            self._free.append(block)

    def taint(self, block: int) -> None:
        """The block holds values that are not finite: wipe it before anyone else gets it."""
        self._tainted.add(block)

    def is_tainted(self, block: int) -> bool:
        return block in self._tainted

    # ---- Tenant ----

    def spare(self) -> dict[int, float]:
        return {lease: self._used[lease] for lease, held in self._held.items() if not held}

    def give_up(self, lease: int) -> None:
        blocks = self._blocks(lease)
        for block in blocks:
            if self._idle.pop(block, None) is not None:
                self._forget(block)
        self._free = [block for block in self._free if block not in blocks]
        del self._held[lease], self._used[lease]
        self._arena.release(lease, self.run)

    def check(self) -> None:
        """Raise `InternalError` unless every leased block is exactly one of free, held and idle."""
        leased = {block for lease in self._held for block in self._blocks(lease)}
        states = [*self._free, *self._refs, *self._idle]
        if len(states) != len(set(states)) or set(states) != leased:
            raise InternalError(f"cache {self.spec.name} leaks: {len(states)} accounted for, {len(leased)} leased")

    def _grow(self) -> bool:
        """Lease a superpage. Content that is idle here is only given up when the arena has nothing else."""
        if self._idle and not self._arena.free:
            return False
        lease = self._arena.lease(self.run)
        if lease is None:
            return False
        self._held[lease] = 0
        self._used[lease] = 0.0
        self._free.extend(reversed(self._blocks(lease)))
        return True

    def _refer(self, block: int) -> None:
        self._refs[block] = 1
        self._held[self._lease(block)] += 1

    def _lease(self, block: int) -> int:
        return (block // self.per_lease) * self.run

    def _blocks(self, lease: int) -> range:
        first = (lease // self.run) * self.per_lease
        return range(first, first + self.per_lease)

    def _forget(self, block: int) -> None:
        if self._evicted is not None:
            self._evicted(block)
