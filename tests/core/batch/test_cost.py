"""What a launch costs: a fixed part and a price per unit, learned from mixed launches."""

from __future__ import annotations

import pytest

from polymux.core.batch.cost import LaunchCost


def test_nothing_is_bounded_before_the_first_launch() -> None:
    assert LaunchCost().units_within(1.0) == float("inf")


def test_a_fixed_cost_is_told_from_the_price_of_a_unit() -> None:
    """Decode steps of 8 tokens and chunks of 1,000, both with weights to read: the price is the slope between them."""
    cost = LaunchCost()
    for _ in range(5):
        cost.learn(8, 4.0 + 8 * 0.02)
        cost.learn(1000, 4.0 + 1000 * 0.02)
    assert cost.unit == pytest.approx(0.02)
    assert cost.units_within(30.0) == pytest.approx(1300)


def test_a_long_run_of_like_launches_keeps_the_price() -> None:
    """Hundreds of decode steps say nothing about prompts; what was known of them stays."""
    cost = LaunchCost()
    cost.learn(1000, 24.0)
    for _ in range(500):
        cost.learn(8, 4.16)
    assert cost.units_within(30.0) == pytest.approx(1300, rel=0.1)


def test_one_slow_launch_is_forgotten() -> None:
    """The first launch compiled kernels for seconds; it does not shape plans for long."""
    cost = LaunchCost()
    cost.learn(1000, 5000.0)
    for _ in range(150):
        cost.learn(8, 4.16)
        cost.learn(64, 5.28)
    assert cost.units_within(30.0) > 600
