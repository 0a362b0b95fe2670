"""Windows hold all that is said, once, and are cut where nobody speaks, however the recording arrives."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.modalities.asr.utterances import FRAME, Endpointing
from polymux.modalities.asr.windows import REST, SpeechCutter, find_pause

LONGEST = 16_000
RATE = 16_000


def cut(
    samples: np.ndarray, speech: np.ndarray, pieces: Sequence[int] = (), longest: int = LONGEST
) -> list[tuple[int, int]]:
    """(start, count) of each window when the samples arrive in pieces of these sizes. `speech`: one per frame."""
    cutter, windows, place, judged = SpeechCutter(longest, Endpointing()), [], 0, 0
    for size in [*pieces, len(samples)]:
        end = min(place + size, len(samples))
        last = end == len(samples)
        frames = -(-end // FRAME) if last else end // FRAME
        windows += cutter.push(samples[place:end], speech[judged:frames], last=last)
        assert len(cutter._held) <= 2 * longest + size + REST * RATE + 2 * RATE
        place, judged = end, frames
        if last:
            break
    assert cutter.position == len(samples)
    for window in windows:
        assert np.array_equal(window.samples, samples[window.start : window.start + len(window.samples)])
    return [(window.start, len(window.samples)) for window in windows]


def noise(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 0.1, length).astype(np.float32)


def frames(length: int) -> int:
    return -(-length // FRAME)


@settings(max_examples=40, deadline=None)
@given(st.integers(FRAME * 5, 100_000), st.lists(st.integers(1, 30_000), max_size=8), st.integers(0, 2**32 - 1))
def test_where_speech_never_ends_nothing_is_lost(length, pieces, seed):
    samples = noise(length, seed)
    windows = cut(samples, np.ones(frames(length)), pieces)
    assert windows == cut(samples, np.ones(frames(length)))
    assert sum(count for _, count in windows) == length
    assert [start for start, _ in windows] == [sum(count for _, count in windows[:i]) for i in range(len(windows))]
    assert all(0 < count <= LONGEST for _, count in windows)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(4, 200), st.integers(1, 500)), max_size=6),
    st.lists(st.integers(1, 90_000), max_size=8),
)
def test_every_utterance_is_in_a_window_and_windows_never_overlap(stretches, pieces):
    """Stretches are (frames of speech, frames of silence)."""
    speech = np.array([value for loud, quiet in stretches for value in [1.0] * loud + [0.0] * quiet])
    samples = noise(len(speech) * FRAME)
    windows = cut(samples, speech, pieces, longest=30 * RATE)
    assert windows == cut(samples, speech, longest=30 * RATE)
    assert all(count <= 30 * RATE for _, count in windows)
    covered = np.zeros(len(samples), int)
    for start, count in windows:
        covered[start : start + count] += 1
    assert covered.max(initial=0) <= 1
    assert covered[np.repeat(speech, FRAME) > 0].all()


def test_a_long_rest_belongs_to_no_window():
    speech = np.concatenate([np.ones(60), np.zeros(600), np.ones(60), np.zeros(60)])
    (first, second) = cut(noise(len(speech) * FRAME), speech, longest=30 * RATE)
    assert first == (0, 60 * FRAME + int(0.4 * RATE))
    assert second[0] == 660 * FRAME - int(0.4 * RATE)
    assert cut(noise(100 * FRAME), np.zeros(100)) == []


def test_cuts_in_the_pause():
    samples = noise(LONGEST)
    samples[12_000:15_200] = 0
    assert 12_000 < find_pause(samples) < 15_200


def test_steady_sound_is_cut_late():
    """As few windows as can be: of equally quiet places the latest counts."""
    assert find_pause(np.zeros(LONGEST, np.float32)) > LONGEST * 0.85
