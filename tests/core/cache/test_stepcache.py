"""Rules of step caches as plain arithmetic: schedules known beforehand, decisions by distance, and the guards."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.cache.arena import Arena
from polymux.core.cache.saved import RESIDUAL, SIGNAL, Saved, SavedTokens, saved_tokens
from polymux.core.cache.stepcache import FirstBlock, MagCache, StepCache, StepMask, StepRule, TaylorSeer, TeaCache


def run(rule: StepRule, steps: int, distances: list[float] | float = 0.0) -> str:
    """One row from its first step to its last: `#` for a computed step, `.` for a skipped one."""
    cache = StepCache(rule, steps)
    for step in range(steps):
        if cache.foresee(step) is None:
            cache.decide(step, distances if isinstance(distances, float) else distances[step])
    return "".join("#" if cache.computed[step] else "." for step in range(steps))


def test_taylorseer_computes_every_interval_after_the_warmup() -> None:
    assert run(TaylorSeer(interval=5, warmup=3, tail=0), 16) == "###.#....#....#."
    assert run(TaylorSeer(interval=5, warmup=3, tail=1), 16) == "###.#....#....##"


def test_a_mask_is_stretched_to_the_number_of_steps() -> None:
    assert run(StepMask(mask=(True, False, False, True)), 4) == "#..#"
    assert run(StepMask(mask=(True, False, False, True), tail=0), 8) == "##....##"


def test_magcache_of_even_ratios_skips_as_often_as_it_may() -> None:
    assert run(MagCache(ratios=(1.0,) * 10, retention=0.2, max_skips=3, tail=0), 10) == "##...#...#"
    assert run(MagCache(ratios=(1.0, *(2.0,) * 9), threshold=0.5), 10) == "#" * 10


@pytest.mark.parametrize("rule", [FirstBlock(threshold=0.1), TeaCache(threshold=0.1, polynomial=(1.0, 0.0))])
def test_the_first_and_the_last_step_are_computed_whatever_is_measured(rule: StepRule) -> None:
    assert run(rule, 5, 0.0) == "#...#"
    assert run(rule, 1) == "#"


def test_a_first_block_that_moves_further_than_the_threshold_computes() -> None:
    assert run(FirstBlock(threshold=0.1, tail=0), 6, [0, 0.05, 0.11, 0.1, 0.2, 0.01]) == "#.#.#."


def test_teacache_accumulates_until_the_threshold() -> None:
    assert run(TeaCache(threshold=0.25, polynomial=(1.0, 0.0), tail=0), 8, 0.1) == "#..#..#."


@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 6), st.integers(0, 4))
def test_guards_hold_for_every_rule(steps: int, cap: int, warmup: int, tail: int) -> None:
    """Warm-up and tail are computed, and never more than the cap is skipped in a row."""
    options = {"max_skips": cap, "warmup": warmup, "tail": tail}
    for rule in (
        FirstBlock(**options),
        TeaCache(**options),
        StepMask(mask=(False,), **options),
        TaylorSeer(interval=9, **options),
        MagCache(ratios=(1.0,), **options),
    ):
        pattern = run(rule, steps)
        assert "." not in pattern[:warmup]
        assert tail == 0 or "." not in pattern[-tail:]
        assert "." * (cap + 1) not in pattern


def test_a_distance_that_is_not_a_number_computes() -> None:
    assert run(FirstBlock(tail=0), 4, [0, math.nan, 0.0, math.inf]) == "##.#"


def test_a_decision_stands_when_the_step_is_run_again() -> None:
    cache = StepCache(TeaCache(threshold=0.25, polynomial=(1.0, 0.0)), 9)
    cache.foresee(0)
    cache.decide(1, 0.2)
    assert cache.foresee(1) is False
    cache.decide(2, 0.2)
    assert cache.foresee(2) is True


@pytest.mark.parametrize("tokens", [1, 63, 64, 65, 200])
def test_saved_tokens_come_back_from_scattered_blocks(tokens: int) -> None:
    """Two rows, two planes each, whose blocks lie anywhere in the arena."""
    arena = Arena(1 << 18, torch.device("cpu"), superpage=1 << 16)
    spec = saved_tokens("test", 8, torch.float32)
    pages = SavedTokens(arena, spec)
    rows = [Saved(FirstBlock(), 4, tokens, branch=0) for _ in range(2)]
    blocks = torch.randperm(30, generator=torch.Generator().manual_seed(tokens)).tolist()
    for number, row in enumerate(rows):
        row.locate(blocks[number * 10 : number * 10 + -(-row.units // 64)], torch.device("cpu"))
    signal, residual = torch.randn(2, tokens, 8), torch.randn(2, tokens, 8)
    pages.write(rows, SIGNAL, signal)
    pages.write(rows, RESIDUAL, residual)
    assert torch.equal(pages.read(rows, SIGNAL), signal)
    assert torch.equal(pages.read(rows[::-1], RESIDUAL), residual.flip(0))


def test_extrapolation_is_exact_for_a_polynomial_of_its_order() -> None:
    saved = Saved(TaylorSeer(), 20, tokens=4, branch=0)
    line = [torch.tensor([3.0 + 2.0 * step]) for step in range(9)]
    for step in (0, 1, 4):
        saved.expand(line[step], step, order=1)
    for step in (5, 8):
        torch.testing.assert_close(saved.extrapolate(step), line[step])
