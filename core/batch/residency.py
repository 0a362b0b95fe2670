"""What the rows of one stage hold on the device: a slot each, and blocks of the stage's cache classes.

Rows of a paged class grow block by block. Where the stage shares prefixes, full blocks whose content is computed
are indexed, and found again when another row is admitted.
"""

from __future__ import annotations

from polymux.core.batch.encode import EncodeRow
from polymux.core.batch.row import Row
from polymux.core.batch.sequence import TokenRow
from polymux.core.batch.stage import Stage
from polymux.core.cache.arena import Arena
from polymux.core.cache.blocks import BlockPool
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import LatestChain, PrefixIndex
from polymux.core.errors import InternalError

WORTH_WAITING = 128
"""Prompt tokens that another row is computing from which on a row waits for them."""

MARGIN = 0.05
"""Share of a class's blocks kept free when a row is admitted beside others, so that those can grow."""

KEPT_MARGIN = 0.25
"""The same for a row that keeps its blocks: what was encoded must find room to be decoded before more is."""


class Residency:
    """Slots and blocks for one stage's rows."""

    def __init__(self, stage: Stage, arena: Arena) -> None:
        self.stage = stage
        self.index = PrefixIndex()
        self._latest = LatestChain()
        self.queried = 0
        """Prompt units looked up in the prefix index."""
        self.hits = 0
        """Prompt units it answered."""
        self._promised: dict[bytes, Row] = {}
        """Digests of full blocks, or of items, that a running row is about to compute."""
        self._slots = list(range(stage.max_rows - 1, -1, -1))
        self.pool = BlockPool(arena, stage.cache, self.index.forget) if stage.cache is not None else None

    @property
    def rows(self) -> int:
        return self.stage.max_rows - len(self._slots)

    @property
    def capacity(self) -> int:
        """Units the longest row could ever hold."""
        return self.pool.capacity * self.pool.spec.units if self.pool is not None else 2**31

    def admit(self, row: Row, *, alone: bool) -> bool:
        """Give the row a slot and its cached prefix, if the rest of what it needs now is there too.

        With `alone` no other row runs, and the margin does not count.
        """
        if not self._slots:
            return False
        if self.pool is not None:
            prefix = self._match(row)
            idle = self.pool.count_idle(prefix)
            if row.keeps:
                spare = int(self.pool.capacity * KEPT_MARGIN) if self.pool.held else 0
            else:
                spare = 0 if alone else int(self.pool.capacity * MARGIN)
            missing = self._blocks_for(self.stage.units(row)) - len(prefix)
            if missing and not self.pool.has_room(idle + missing + spare):  # a row may save nothing at all
                return False
            for block in prefix:
                self.pool.hold(block)
            row.blocks = prefix
            row.scheduled = row.done = len(prefix) * self.pool.spec.units
            if isinstance(row, TokenRow | EncodeRow):
                row.published = len(prefix)
                self._promise(row)
            if isinstance(row, TokenRow):
                row.matched = len(prefix)
            if isinstance(row, TokenRow) and not row.preempted:
                row.cached = row.done
                self.queried += row.prompt_length
                self.hits += row.done
        row.slot = self._slots.pop()
        self.stage.admitted(row)
        return True

    def awaits(self, row: Row) -> bool:
        """Whether a running row is computing most of what this one would: then its blocks are worth waiting for."""
        if isinstance(row, EncodeRow):
            return any(piece in self._promised for piece in row.pieces())
        if not self._promised or not isinstance(row, TokenRow) or self.pool is None:
            return False
        size = self.pool.spec.units
        chain = self._chain(row)
        start = block = len(self.index.follow(chain))
        while block < len(chain) and chain[block] in self._promised:
            block += 1
        promised, missing = (block - start) * size, len(row.tokens) - start * size
        return promised >= WORTH_WAITING and 2 * promised >= missing

    def grow(self, row: Row, units: int) -> bool:
        """Blocks for the row's first `units` units; False when there is no room."""
        if self.pool is None:
            return True
        missing = -(-units // self.pool.spec.units) - len(row.blocks)
        if missing <= 0:
            return True
        fresh = self.pool.allocate(missing)
        if fresh is None:
            return False
        row.blocks.extend(fresh)
        return True

    def release(self, row: Row) -> None:
        """Take everything back. The tail goes first, so that a prefix loses its end before its head."""
        if row.inflight:
            raise InternalError("a row was released while a launch names it")
        if self.pool is not None:
            if row.keeps and row.done and not row.job.over:
                row.holding = Holding(self.pool, self.index, row.blocks)
                row.job.own(row.holding)
            else:
                if isinstance(row, TokenRow) and row.job.over and not row.generated:
                    self._wipe(row.blocks[row.matched :])  # nobody ever saw whether they are finite
                for block in reversed(row.blocks):
                    self.pool.release(block, keep=block in self.index)
        row.blocks = []
        if isinstance(row, TokenRow | EncodeRow):
            self._withdraw(row)
        if row.slot >= 0:
            self._slots.append(row.slot)
            self.stage.released(row)
            row.slot = -1

    def taint(self, row: Row) -> None:
        """The row's computation went wrong: nobody may reuse what it wrote."""
        if self.pool is not None:
            self._wipe(row.blocks)

    def publish(self, row: Row) -> None:
        """Index the row's full blocks that are computed by now."""
        if self.pool is not None and isinstance(row, EncodeRow):
            for place in range(row.published, row.done):
                if not self.pool.is_tainted(row.blocks[place]):
                    self.index.publish(row.digests[place], row.blocks[place])
                self._promised.pop(row.digests[place], None)
            row.published = row.done
            return
        if self.pool is None or not self.stage.shares_prefixes or not isinstance(row, TokenRow):
            return
        size = self.pool.spec.units
        if row.done < (row.published + 1) * size:  # most steps fill no block
            return
        full = min(row.done, len(row.tokens)) // size
        if full <= row.published:
            return
        chain = row.chain(size, self._latest)
        for place in range(row.published, full):
            if not self.pool.is_tainted(row.blocks[place]):  # a launch still out may complete a failed row's block
                self.index.publish(chain[place], row.blocks[place])
            self._promised.pop(chain[place], None)
        row.published = full

    def check(self) -> None:
        """Raise `InternalError` if blocks leak, or are held while no row runs."""
        if self.pool is not None:
            self.pool.check()
            if self.pool.held and self.rows == 0:
                raise InternalError(f"{self.pool.held} blocks of {self.pool.spec.name} are held and no row runs")
            if self.rows == 0 and self.pool.idle != len(self.index):
                raise InternalError(f"{len(self.index)} blocks of {self.pool.spec.name} are indexed, not the idle ones")

    def _match(self, row: Row) -> list[int]:
        """Indexed blocks of the row's prefix; at least one unit is left to compute: a sample needs a forward pass."""
        found: list[int] = []
        if isinstance(row, EncodeRow):
            row.arrange(self.index.find)
            blocks = [self.index.find(digest) for digest in row.digests[: row.known]]
            return [block for block in blocks if block is not None]
        if self.pool is None or not self.stage.shares_prefixes or not isinstance(row, TokenRow):
            return found
        return self.index.follow(self._chain(row))

    def _chain(self, row: TokenRow) -> list[bytes]:
        """Digests of the blocks that a row may find computed: the last token is left, a sample needs a forward pass."""
        size = self.pool.spec.units if self.pool is not None else 1
        return row.chain(size, self._latest)[: (len(row.tokens) - 1) // size]

    def _promise(self, row: TokenRow | EncodeRow) -> None:
        if isinstance(row, EncodeRow):
            for digest in row.digests[row.published :]:
                self._promised[digest] = row
        elif self.pool is not None and self.stage.shares_prefixes:
            size = self.pool.spec.units
            for digest in row.chain(size, self._latest)[row.published : len(row.tokens) // size]:
                self._promised.setdefault(digest, row)

    def _withdraw(self, row: TokenRow | EncodeRow) -> None:
        for digest in row.digests[row.published :]:
            if self._promised.get(digest) is row:
                del self._promised[digest]

    def _wipe(self, blocks: list[int]) -> None:
        if self.pool is not None:
            for block in blocks:
                self.index.forget(block)
                self.pool.taint(block)

    def _blocks_for(self, units: int) -> int:
        return -(-units // self.pool.spec.units) if self.pool is not None else 0
