"""What a launch costs: something anyhow, and a price per unit of long work."""

from __future__ import annotations

import pytest

from polymux.core.batch.cost import LaunchCost

STEP, CHUNK = 4.0, 24.0
"""A decode step, and one with 1,000 tokens of prompts beside it: 0.02 ms a token."""


def learned() -> LaunchCost:
    cost = LaunchCost()
    for _ in range(10):
        cost.learn(0, STEP)
        cost.learn(1000, CHUNK)
    return cost


def test_nothing_is_bounded_before_the_first_launch() -> None:
    assert LaunchCost().units_within(1.0) == float("inf")


def test_what_every_launch_costs_is_told_from_the_price() -> None:
    assert learned().price == pytest.approx(0.02)
    assert learned().units_within(30.0) == pytest.approx(1300)


def test_launches_of_one_size_may_be_cheaper_to_enlarge_than_they_seem() -> None:
    """They say nothing about what a unit adds: twice as many are tried, where that does not take long."""
    cost = LaunchCost()
    cost.learn(4, 40.0)
    assert cost.units_within(60.0) == pytest.approx(8)
    assert cost.units_within(30.0) == pytest.approx(8)
    assert cost.units_within(20.0) == pytest.approx(2)


def test_without_short_steps_sizes_tell_the_price() -> None:
    cost = LaunchCost()
    for number in range(60):
        units = 1 + number % 7
        cost.learn(units, 9.0 + 1.5 * units)
    assert cost.price == pytest.approx(1.5)
    assert cost.base == pytest.approx(9.0)


def test_launches_that_were_cut_to_one_row_grow_again() -> None:
    """A pass of one window takes three quarters of a slice, whatever its size: twenty may share one."""
    cost, units = LaunchCost(), 1
    for _ in range(40):
        cost.learn(units, 15.0 + 0.2 * units)
        units = max(1, min(20, int(cost.units_within(20.0))))
    assert units == 20


def test_a_long_run_of_short_steps_keeps_the_price() -> None:
    """Hundreds of decode steps, of more and fewer rows, say nothing about prompts."""
    cost = learned()
    for number in range(500):
        cost.learn(0, STEP + 0.8 * (number % 3 - 1))
    assert cost.units_within(30.0) == pytest.approx(1300, rel=0.05)


def test_the_first_slow_launch_is_forgotten() -> None:
    """It compiled kernels for seconds; it does not shape plans for long."""
    cost = LaunchCost()
    cost.learn(1000, 5000.0)
    for _ in range(30):
        cost.learn(0, STEP)
        cost.learn(64, STEP + 64 * 0.02)
    assert cost.units_within(30.0) > 600


def test_a_surprise_counts_little_once_there_is_something_to_expect() -> None:
    """A graph recorded in the middle of serving must not make prompts crawl."""
    cost = learned()
    cost.learn(600, 900.0)
    cost.learn(0, 900.0)
    assert cost.units_within(30.0) > 500


def test_slower_for_good_is_believed_soon() -> None:
    """Contexts grew: steps take five times as long."""
    cost = learned()
    for _ in range(20):
        cost.learn(0, 5 * STEP)
    assert cost.base == pytest.approx(5 * STEP, rel=0.05)
