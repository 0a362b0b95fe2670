"""The arena: superpages for every class, block strides that fit, and room made where content was idle for longest."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.cache.arena import ALIGNMENT, SUPERPAGE, Arena, fit_stride
from polymux.core.cache.blocks import BlockPool, CacheSpec, paged_kv, view_blocks
from polymux.core.errors import InternalError

CPU = torch.device("cpu")
PAGE = 1 << 14


def pool_of(arena: Arena, *, nbytes: int, name: str = "kv") -> BlockPool:
    return BlockPool(arena, CacheSpec(name, (nbytes,), torch.uint8, 1))


@given(
    layers=st.integers(1, 96),
    heads=st.sampled_from([1, 2, 4, 8, 16, 20, 32]),
    dim=st.sampled_from([32, 64, 80, 96, 128, 256]),
    block=st.sampled_from([8, 16, 32, 64]),
    width=st.sampled_from([1, 2, 4]),
)
def test_a_block_of_any_model_fits_its_stride(layers: int, heads: int, dim: int, block: int, width: int) -> None:
    """Strides hold the block, are aligned, and tile the superpages they are cut from."""
    nbytes = layers * 2 * block * heads * dim * width
    stride, run = fit_stride(nbytes, SUPERPAGE)
    assert stride >= nbytes
    assert stride % ALIGNMENT == 0
    if run == 1:
        assert SUPERPAGE % stride == 0
    else:
        assert stride == run * SUPERPAGE
        assert stride - nbytes < SUPERPAGE


@pytest.mark.parametrize("layers", [12, 16, 24, 26, 28, 32, 36, 40, 48, 64, 80])
@pytest.mark.parametrize("heads", [2, 4, 8])
def test_blocks_of_common_models_waste_little(layers: int, heads: int) -> None:
    """The superpage's divisors lie close: 16 tokens of a common model lose less than a fifth."""
    nbytes = layers * 2 * 16 * heads * 128 * 2
    stride, run = fit_stride(nbytes, SUPERPAGE)
    assert (stride - nbytes) / stride < 0.2, (stride, run)


@given(nbytes=st.integers(1, 5 * PAGE), pages=st.integers(5, 9))
def test_blocks_of_a_class_never_overlap(nbytes: int, pages: int) -> None:
    """Writing one block's bytes changes no other block."""
    arena = Arena(pages * PAGE, CPU, PAGE)
    pool = pool_of(arena, nbytes=nbytes)
    view = view_blocks(arena, pool.spec)
    blocks = pool.allocate(min(pool.capacity, 7))
    assert blocks is not None
    for value, block in enumerate(blocks, 1):
        view[block].fill_(value)
    for value, block in enumerate(blocks, 1):
        assert (view[block] == value).all()


def test_a_view_reads_what_its_block_says() -> None:
    """Layers, keys and values, tokens, heads: the strided view is an ordinary contiguous block inside."""
    arena = Arena(4 * PAGE, CPU, PAGE)
    spec = paged_kv("kv", layers=2, heads=2, dim=8, dtype=torch.float16, block=4)
    view = view_blocks(arena, spec)
    assert view.shape[1:] == (2, 2, 4, 2, 8)
    assert view[1].is_contiguous()
    view[1] = torch.arange(view[1].numel(), dtype=torch.float16).view(view[1].shape)
    assert view[1].flatten()[-1] == view[1].numel() - 1
    assert not view[0].any() or view[0].data_ptr() != view[1].data_ptr()


def test_a_leased_superpage_is_blank() -> None:
    """Another class's bytes may read as NaN: a masked place would pass it on."""
    arena = Arena(PAGE, CPU, PAGE)
    arena.buffer.fill_(255)
    first = arena.lease()
    assert first == 0
    assert not arena.buffer.any()


def test_releasing_twice_is_an_error() -> None:
    arena = Arena(2 * PAGE, CPU, PAGE)
    first = arena.lease()
    assert first is not None
    arena.release(first)
    with pytest.raises(InternalError, match="twice"):
        arena.release(first)


def test_an_arena_needs_a_superpage() -> None:
    with pytest.raises(InternalError, match="less than one superpage"):
        Arena(PAGE - 1, CPU, PAGE)


def test_a_large_block_gets_adjacent_superpages_from_scattered_idle_content() -> None:
    """An encoder's slab needs neighbours: exactly one window is vacated, the one whose content was idle for longest."""
    arena = Arena(8 * PAGE, CPU, PAGE)
    small, large = pool_of(arena, nbytes=PAGE, name="small"), pool_of(arena, nbytes=2 * PAGE, name="large")
    blocks = small.allocate(8)
    assert blocks is not None
    for block in [*blocks[4:], *blocks[:4]]:
        small.release(block, keep=True)
    assert large.has_room(4)
    assert not large.has_room(5)
    slab = large.allocate(1)
    assert slab == [2]  # superpages 4 and 5: idle before 0 and 1
    assert small.idle == 6
    small.check(), large.check()


def test_a_large_block_does_not_evict_in_vain() -> None:
    """Where no window can be had, idle content stays."""
    arena = Arena(4 * PAGE, CPU, PAGE)
    small, large = pool_of(arena, nbytes=PAGE, name="small"), pool_of(arena, nbytes=2 * PAGE, name="large")
    blocks = small.allocate(4)
    assert blocks is not None
    small.release(blocks[0], keep=True)
    small.release(blocks[2], keep=True)
    assert not large.has_room(1)
    assert large.allocate(1) is None
    assert small.idle == 2


@given(
    frees=st.lists(st.booleans(), min_size=1, max_size=40),
    run=st.integers(1, 5),
)
def test_a_lease_is_the_first_aligned_run_of_free_superpages(frees: list[bool], run: int) -> None:
    """Found by searching bytes; what it must be is said plainly here."""
    arena = Arena(len(frees), CPU, 1)
    for page, free in enumerate(frees):
        if not free:
            arena._free[page] = 0
    wanted = [first for first in range(0, len(frees) - run + 1, run) if all(frees[first : first + run])]
    assert arena.lease(run) == (wanted[0] if wanted else None)
    assert arena.free == sum(frees) - (run if wanted else 0)


def test_room_counts_what_others_could_give_up() -> None:
    """Free superpages and those of another class that no row refers to, whatever the sizes of the leases."""
    arena = Arena(12 * PAGE, CPU, PAGE)
    small, large = pool_of(arena, nbytes=PAGE // 2, name="small"), pool_of(arena, nbytes=2 * PAGE, name="large")
    held = large.allocate(2)
    assert held is not None
    assert arena.room(small) == 8
    large.release(held[0], keep=True)
    assert arena.room(small) == 10
    large.release(held[1], keep=False)
    assert arena.room(small) == 12
