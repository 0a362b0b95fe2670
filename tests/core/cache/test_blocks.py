"""Block pools: whatever two classes do in one arena, nothing leaks and nothing is handed out twice."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from polymux.core.cache.arena import Arena
from polymux.core.cache.blocks import BlockPool, CacheSpec, view_blocks
from polymux.core.errors import InternalError

CPU = torch.device("cpu")
PAGE = 1 << 13
TENANTS = st.sampled_from([0, 1, 2])


def spec_of(nbytes: int, name: str = "kv") -> CacheSpec:
    return CacheSpec(name, (nbytes,), torch.uint8, 1)


class Tenancy(RuleBasedStateMachine):
    """Three classes (many blocks a superpage, one, and one that takes two) against a model of who holds what."""

    @initialize(pages=st.integers(2, 7))
    def open(self, pages: int) -> None:
        self.arena = Arena(pages * PAGE, CPU, PAGE)
        self.lost: list[set[int]] = [set(), set(), set()]
        sizes = (PAGE // 4, PAGE, PAGE + 1)
        self.pools = [
            BlockPool(self.arena, spec_of(size, f"class {number}"), self.lost[number].add)
            for number, size in enumerate(sizes)
        ]
        self.views = [view_blocks(self.arena, pool.spec) for pool in self.pools]
        self.refs: list[dict[int, int]] = [{}, {}, {}]
        self.kept: list[dict[int, int]] = [{}, {}, {}]
        """Idle blocks and the mark their content carries."""
        self.marks = 0

    @rule(tenant=TENANTS, count=st.integers(1, 9))
    def allocate(self, tenant: int, count: int) -> None:
        pool = self.pools[tenant]
        roomy = pool.has_room(count)
        before = sum(pool.idle for pool in self.pools)
        blocks = pool.allocate(count)
        assert (blocks is not None) == roomy
        if blocks is None:
            assert sum(pool.idle for pool in self.pools) == before, "nothing is evicted for nothing"
            return
        assert len(set(blocks)) == count
        for block in blocks:
            assert block not in self.refs[tenant]
            self.refs[tenant][block] = 1
            self._mark(tenant, block)

    @rule(tenant=TENANTS, pick=st.integers(0, 99), keep=st.booleans(), taint=st.booleans())
    def release(self, tenant: int, pick: int, keep: bool, taint: bool) -> None:
        held = sorted(self.refs[tenant])
        if not held:
            return
        block = held[pick % len(held)]
        if taint:
            self.pools[tenant].taint(block)
        mark = int(self.views[tenant][block][0])
        self.pools[tenant].release(block, keep=keep and not taint)
        self.refs[tenant][block] -= 1
        if not self.refs[tenant][block]:
            del self.refs[tenant][block]
            if keep and not self.pools[tenant].is_tainted(block) and not taint:
                self.kept[tenant][block] = int(self.views[tenant][block][0])
            elif taint:
                assert not self.views[tenant][block].any(), "what is not finite is wiped"
        else:
            assert int(self.views[tenant][block][0]) == mark

    @rule(tenant=TENANTS, pick=st.integers(0, 99))
    def hold(self, tenant: int, pick: int) -> None:
        known = sorted({*self.refs[tenant], *self.kept[tenant]})
        if not known:
            return
        block = known[pick % len(known)]
        self.pools[tenant].hold(block)
        self.kept[tenant].pop(block, None)
        self.refs[tenant][block] = self.refs[tenant].get(block, 0) + 1

    @invariant()
    def whole(self) -> None:
        if not hasattr(self, "pools"):
            return
        leased = 0
        for tenant, pool in enumerate(self.pools):
            for block in self.lost[tenant]:
                assert self.kept[tenant].pop(block, None) is not None, "only idle content is evicted"
            self.lost[tenant].clear()
            pool.check()
            assert pool.held == len(self.refs[tenant])
            assert pool.idle == len(self.kept[tenant])
            for block, mark in self.kept[tenant].items():
                assert int(self.views[tenant][block][-1]) == mark, "idle content stays as it was"
            leased += len(pool._held) * pool.run
        assert leased + self.arena.free == self.arena.total

    def _mark(self, tenant: int, block: int) -> None:
        self.marks = self.marks % 250 + 1
        self.views[tenant][block].fill_(self.marks)


Tenancy.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_tenancy = Tenancy.TestCase


def test_growing_never_hands_out_a_block_twice() -> None:
    """Found by the machine above: a superpage whose blocks had just been taken was vacated to get the rest."""
    pool = BlockPool(Arena(2 * PAGE, CPU, PAGE), spec_of(PAGE // 4))
    assert pool.allocate(4) is not None
    second = pool.allocate(4)
    assert second is not None
    for block in second:
        pool.release(block, keep=False)
    assert pool.allocate(5) is None
    again = pool.allocate(4)
    assert again is not None and sorted(again) == sorted(second)
    pool.check()


def test_another_class_gets_the_room_that_idle_content_holds() -> None:
    """A full prefix cache of one model must not keep another model from starting."""
    arena = Arena(2 * PAGE, CPU, PAGE)
    forgotten: list[int] = []
    first, second = BlockPool(arena, spec_of(PAGE // 4, "a"), forgotten.append), BlockPool(arena, spec_of(PAGE, "b"))
    for block in first.allocate(8) or ():
        first.release(block, keep=True)
    assert arena.free == 0
    assert second.has_room(2)
    assert not second.has_room(3)
    assert second.allocate(1) is not None
    assert sorted(forgotten) == [0, 1, 2, 3], "the superpage that was idle for longest, and only that"
    first.check(), second.check()


def test_misuse_is_an_error() -> None:
    pool = BlockPool(Arena(PAGE, CPU, PAGE), spec_of(PAGE // 4))
    with pytest.raises(InternalError, match="neither held nor idle"):
        pool.hold(0)
    blocks = pool.allocate(1)
    assert blocks is not None
    pool.release(blocks[0], keep=False)
    with pytest.raises(InternalError, match="released twice"):
        pool.release(blocks[0], keep=False)
