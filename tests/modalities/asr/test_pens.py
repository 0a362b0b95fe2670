"""Looks wait for their turn where each slows the others down, and nobody waits for one that went away."""

from __future__ import annotations

import pytest

from polymux.modalities.asr.pens import Pens
from polymux.modalities.asr.utterance import Utterance


@pytest.fixture
def utterances() -> list[Utterance]:
    return [Utterance(index, 0) for index in range(4)]


def test_first_words_come_before_later_ones_and_those_in_order(utterances):
    first, told, new, newer = utterances
    pens = Pens(1)
    assert pens.take(first, told=False, urgent=False)
    for utterance, known in ((told, True), (new, False), (newer, False)):
        assert not pens.take(utterance, told=known, urgent=False)
    order = []
    for _ in range(3):
        pens.give_back()
        may = [each for each in (told, new, newer) if each not in order]
        taken = [each for each in may if pens.take(each, told=each is told, urgent=False)]
        assert len(taken) == 1
        order += taken
    assert order == [new, newer, told]


def test_last_words_wait_for_nobody_and_the_others_for_them(utterances):
    draft, last, other, _ = utterances
    pens = Pens(1)
    assert pens.take(draft, told=False, urgent=False)
    assert pens.take(last, told=True, urgent=True)
    pens.give_back()
    assert not pens.take(other, told=False, urgent=False)
    pens.give_back()
    assert pens.take(other, told=False, urgent=False)


def test_one_that_became_urgent_or_went_away_is_not_waited_for(utterances):
    draft, urgent, gone, other = utterances
    pens = Pens(1)
    assert pens.take(draft, told=False, urgent=False)
    for waiting in (urgent, gone, other):
        assert not pens.take(waiting, told=False, urgent=False)
    assert pens.take(urgent, told=False, urgent=True)
    pens.leave(gone)
    pens.give_back()
    pens.give_back()
    assert pens.take(other, told=False, urgent=False)


def test_without_a_number_nobody_waits(utterances):
    pens = Pens()
    assert all(pens.take(utterance, told=False, urgent=False) for utterance in utterances)
