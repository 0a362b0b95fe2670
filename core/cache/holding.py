"""Blocks that outlive the row that filled them: an encoder's output that decoder rows read.

The job owns a holding until it ends; every row that reads it counts as a reader until its last launch is collected,
so a cancelled job's blocks are not reused while a launch still reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from polymux.core.cache.blocks import BlockPool
from polymux.core.cache.prefix import PrefixIndex


@dataclass(eq=False)
class Holding:
    """`blocks` of one class with one reference each; those that are indexed stay for whoever asks for them next."""

    pool: BlockPool
    index: PrefixIndex
    blocks: list[int] = field(default_factory=list)
    units: int | None = None
    """Leading units of a slab that say everything: what follows repeats them. None: all count."""

    def hold(self) -> None:
        for block in self.blocks:
            self.pool.hold(block)

    def release(self) -> None:
        for block in self.blocks:
            self.pool.release(block, keep=block in self.index)
