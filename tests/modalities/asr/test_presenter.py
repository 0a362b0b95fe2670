"""Times rise, lie inside the recording, and every text token is told once."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.engine.wire import pack
from polymux.core.tasks import Done, Heard, Segment, TextDelta
from polymux.core.testing.tokenizers import byte_level
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Output, Receipt
from polymux.modalities.asr.presenter import TranscriptPresenter, split_stretches
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.work import WindowText

FIRST = 1_000
TOKENIZER = Tokenizer(byte_level())
TOKENS = SpeechTokens(990, 991, 992, 993, FIRST - 1, 994, 995, {})


def stamp(seconds: float) -> int:
    return FIRST + round(seconds / 0.02)


def present(*windows: WindowText) -> list:
    presenter = TranscriptPresenter(TOKENIZER, TOKENS)
    events = [Output("job", "window", pack(window)) for window in windows]
    events += [Output("job", "heard", pack(Heard("en", 60.0))), Ended("job", Receipt(input_units=3, output_units=9))]
    return [answer for event in events for answer in presenter.feed(event)]


def say(text: str, start: float, end: float) -> list[int]:
    return [stamp(start), *TOKENIZER.encode(text), stamp(end)]


def window(start: float, seconds: float, tokens: list[int]) -> WindowText:
    return WindowText(int(start * 16_000), int(seconds * 16_000), tokens, 0.0, -0.1, 0.01)


def test_segments_joined_equal_the_text():
    """vllm 58029: words at the cuts were lost; vllm 32588: times drifted from window to window."""
    answers = present(
        window(0.0, 28.4, [*say(" The first.", 0.5, 2.0), *say(" The end,", 2.0, 3.0)]),
        window(28.4, 20.0, [*say(" the END.", 1.0, 2.5), *say(" Stop!", 2.5, 4.0)]),
    )
    segments = [answer for answer in answers if isinstance(answer, Segment)]
    deltas = "".join(answer.text for answer in answers if isinstance(answer, TextDelta))
    assert deltas == "".join(segment.text for segment in segments) == "The first. The end, the END. Stop!"
    times = [(segment.start, segment.end) for segment in segments]
    assert times == [(0.5, 2.0), (2.0, 3.0), (29.4, 30.9), (30.9, 32.4)]
    assert [segment.id for segment in segments] == [0, 1, 2, 3]
    assert [segment.seek for segment in segments] == [0, 0, 2840, 2840]
    assert answers[-2:] == [Heard("english", 60.0), Done(answers[-1].usage, Receipt(input_units=3, output_units=9))]
    assert answers[-1].usage.seconds == 60.0


def test_text_whose_end_was_not_said_lasts_until_the_window_does():
    (stretch,) = split_stretches([stamp(1.0), 5, 6], FIRST, 7.0)
    assert (stretch.start, stretch.end, stretch.tokens) == (1.0, 7.0, [5, 6])


def test_one_word_does_not_end_where_it_begins():
    (stretch,) = split_stretches([stamp(3.0), 5, stamp(3.0)], FIRST, 3.0)
    assert 0 <= stretch.start < stretch.end <= 3.0 + 1e-9


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5) | st.integers(FIRST, FIRST + 1500), max_size=30), st.floats(0.1, 30.0))
def test_whatever_the_model_says_times_rise_inside_the_window(tokens, seconds):
    stretches = list(split_stretches(tokens, FIRST, seconds))
    assert [token for stretch in stretches for token in stretch.tokens] == [token for token in tokens if token < FIRST]
    for stretch in stretches:
        assert 0 <= stretch.start < stretch.end <= seconds + 1e-9
    starts = [stretch.start for stretch in stretches]
    assert starts == sorted(starts)
