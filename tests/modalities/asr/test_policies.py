"""What a policy finds certain about unfinished speech is never taken back, and ends with a whole word."""

from __future__ import annotations

from polymux.modalities.asr.policies import AlignAtt, Hypothesis, LocalAgreement, cut_loop

WORDS = {1: " one", 2: " two", 3: " three", 4: "teen", 5: "."}


def begins_word(token: int) -> bool:
    return WORDS[token].startswith(" ")


def test_local_agreement_tells_what_two_looks_in_a_row_say():
    policy = LocalAgreement(begins_word)
    assert policy.judge(Hypothesis([1, 2], 50)) == 0, "nobody has confirmed it yet"
    assert policy.judge(Hypothesis([1, 3, 2], 75)) == 1
    assert policy.judge(Hypothesis([3, 2, 1], 100)) == 2, "hypotheses continue what was told"


def test_local_agreement_keeps_a_word_that_may_go_on():
    policy = LocalAgreement(begins_word)
    policy.judge(Hypothesis([1, 3], 50))
    assert policy.judge(Hypothesis([1, 3], 75)) == 1, "the last word may be half of thirteen"
    policy.reset()
    assert policy.judge(Hypothesis([3], 75)) == 0, "after a cut nothing is confirmed"


def test_align_att_stops_at_the_first_token_that_hears_the_newest_sound():
    policy = AlignAtt(begins_word, margin=8)
    assert policy.judge(Hypothesis([1, 2, 3, 1], 100, [20, 50, 93, 99])) == 2
    assert policy.judge(Hypothesis([1, 3, 4, 1], 100, [20, 50, 93, 99])) == 1, "half a word is none"
    assert policy.judge(Hypothesis([1, 2], 100, [20, 50])) == 1, "nothing says that the last word is whole"
    assert policy.judge(Hypothesis([], 100, [])) == 0


def test_align_att_does_not_believe_a_second_telling():
    policy = AlignAtt(begins_word)
    assert policy.trim(Hypothesis([1, 2, 5, 1, 2], 200, [20, 120, 0, 21, 119])) == 3, "punctuation listens anywhere"
    assert policy.trim(Hypothesis([1, 2, 3], 200, [60, 30, 120])) == 3, "a little disorder is natural"
    assert policy.trim(Hypothesis([3, 2, 3, 1], 200, [20, 110, 120, 21])) == 3, "in other words"
    assert policy.trim(Hypothesis([1, 2, 3], 200, [180, 20, 60])) == 3, "one token astray is no first telling"
    assert policy.trim(Hypothesis([1, 5, 5, 2], 200, [20, 180, 190, 40])) == 4, "nor is punctuation"


def test_what_is_said_again_and_again_is_said_once():
    assert cut_loop([1, 2, 3]) == [1, 2, 3]
    assert cut_loop([1, 2, 3, 3, 3]) == [1, 2, 3]
    assert cut_loop([4, 1, 2, 3, 1, 2, 3, 1]) == [4, 1, 2, 3]
    assert cut_loop([1, 2, 1, 2, 5]) == [1, 2, 1, 2, 5], "it ends otherwise"
    assert cut_loop([]) == []


def test_the_first_round_may_be_told_already():
    assert cut_loop([3, 1, 2, 3], before=[1, 2]) == [3]
    assert cut_loop([1, 2, 1, 2], before=[1, 2]) == []
