"""Logit rules: each row keeps its own, whatever its neighbours carry, and comes back with its state."""

from __future__ import annotations

from random import Random

import pytest
import torch

from polymux.core.compute.rules import LogitRule, Only, Suppress, SuppressFirst
from polymux.core.compute.ruling import RuleStates

CPU = torch.device("cpu")


class NotTwice(LogitRule):
    """The last token may not come again: a rule with a state."""

    width = 1

    def begin(self):
        return (-1,)

    def apply(self, logits, states):
        return logits.masked_fill(torch.arange(logits.shape[1])[None] == states, float("-inf"))

    def advance(self, states, tokens):
        return tokens[:, None]


class Scale(LogitRule):
    """Changes every logit, so that the order of two of them can be seen."""

    def __init__(self, factor: float, amount: float) -> None:
        self.factor, self.amount = factor, amount

    def apply(self, logits, states):
        return logits * self.factor + self.amount


def open_states(*rows, generated=()):
    """Row i, with its rules, in slot i."""
    states = RuleStates(len(rows), CPU)
    for slot, rules in enumerate(rows):
        states.admit(slot, rules, generated)
    return states


def apply(states, rows, slots, logits):
    for use in states.gather(rows, slots):
        logits = use.apply(logits)
    return logits


def test_a_row_sees_its_own_rules_only():
    rows = [(Suppress([0, 2]),), (), (Only([3]),)]
    logits = apply(open_states(*rows), rows, [0, 1, 2], torch.zeros(3, 4))
    assert logits.isinf().tolist() == [[True, False, True, False], [False] * 4, [True, True, True, False]]


def test_rules_apply_in_the_rows_own_order_whatever_a_neighbour_carries():
    double, add = Scale(2.0, 0.0), Scale(1.0, 1.0)
    rows = [(add,), (double, add), (add, double)]
    logits = apply(open_states(*rows), rows, [0, 1, 2], torch.ones(3, 2))
    assert logits[:, 0].tolist() == [2.0, 3.0, 4.0]


def test_the_first_token_only():
    rule = SuppressFirst([1])
    states = open_states((rule,))
    (use,) = states.gather([(rule,)], [0])
    assert use.apply(torch.zeros(1, 3)).isinf().tolist() == [[False, True, False]]
    use.advance(torch.tensor([0]))
    assert not use.apply(torch.zeros(1, 3)).isinf().any()


def test_states_follow_slots_not_places():
    """A launch may hold any of the rows, in any order."""
    rule = NotTwice()
    states = open_states((rule,), (rule,), (rule,))
    for use in states.gather([(rule,), (rule,)], [2, 0]):
        use.advance(torch.tensor([4, 3]))
    logits = apply(states, [(rule,)] * 3, [0, 1, 2], torch.zeros(3, 5))
    assert logits.isinf().nonzero().tolist() == [[0, 3], [2, 4]]


def test_a_preempted_row_comes_back_with_its_state():
    rule = NotTwice()
    states = open_states((rule,), generated=[2, 4])
    assert apply(states, [(rule,)], [0], torch.zeros(1, 5)).isinf().nonzero().tolist() == [[0, 4]]


@pytest.mark.parametrize("seed", range(8))
def test_draws_behind_guesses_are_ruled_as_if_they_came_one_after_the_other(seed):
    """Rows with any number of guesses, right and wrong ones, in any order of draws, beside rows with none."""
    random = Random(seed)
    rule, other = NotTwice(), SuppressFirst([2])
    rows = [(rule, other) if random.random() < 0.7 else (other,) for _ in range(4)]
    bold, plain = open_states(*rows), open_states(*rows)
    said = [[] for _ in rows]
    for _ in range(3):
        guesses = [[random.randrange(4) for _ in range(random.randrange(4))] for _ in rows]
        draws = [(slot, count) for slot, told in enumerate(guesses) for count in range(len(told) + 1)]
        random.shuffle(draws)
        logits = torch.randn(len(draws), 4, generator=torch.Generator().manual_seed(seed))
        uses = bold.gather(
            [rows[slot] for slot, _ in draws],
            [slot for slot, _ in draws],
            [guesses[slot][:count] for slot, count in draws],
        )
        ruled = logits
        for use in uses:
            ruled = use.apply(ruled)
        tokens = ruled.argmax(dim=-1)
        for use in uses:
            use.advance(tokens)
        for slot, told in enumerate(guesses):
            for count in range(len(told) + 1):
                place = draws.index((slot, count))
                (expected,) = apply(plain, [rows[slot]], [slot], logits[place : place + 1])
                assert torch.equal(ruled[place], expected)
                token = int(tokens[place])
                for use in plain.gather([rows[slot]], [slot]):
                    use.advance(tokens[place : place + 1])
                said[slot].append(token)
                if told[count : count + 1] != [token]:
                    break
    assert len(set(map(len, said))) > 1


def test_what_was_only_tried_is_forgotten():
    rule = NotTwice()
    states = open_states((rule,), generated=[1])
    with pytest.raises(ValueError), states.forget():
        for use in states.gather([(rule,)], [0]):
            use.advance(torch.tensor([3]))
        raise ValueError
    assert apply(states, [(rule,)], [0], torch.zeros(1, 5)).isinf().nonzero().tolist() == [[0, 1]]
