"""Windows cover a recording without gap or overlap, and are cut where it is quiet."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.modalities.asr.windows import Cutter, find_pause

LONGEST = 16_000


def cut(samples: np.ndarray, pieces: list[int]) -> list[tuple[int, int]]:
    """(start, count) of each window when the samples arrive in pieces of these sizes."""
    cutter, windows, place = Cutter(LONGEST), [], 0
    for size in pieces:
        windows += cutter.push(samples[place : place + size], last=False)
        place += size
    windows += cutter.push(samples[place:], last=True)
    assert cutter.complete and cutter.position == len(samples)
    return [(window.start, len(window.samples)) for window in windows]


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 100_000), st.lists(st.integers(1, 30_000), max_size=8), st.integers(0, 2**32 - 1))
def test_nothing_is_lost_whatever_the_pieces(length, pieces, seed):
    samples = np.random.default_rng(seed).normal(0, 0.1, length).astype(np.float32)
    windows = cut(samples, pieces)
    assert windows == cut(samples, [])
    assert sum(count for _, count in windows) == length
    assert [start for start, _ in windows] == [sum(count for _, count in windows[:i]) for i in range(len(windows))]
    assert all(0 < count <= LONGEST for _, count in windows)


def test_cuts_in_the_pause():
    samples = np.random.default_rng(0).normal(0, 0.1, LONGEST).astype(np.float32)
    samples[12_000:15_200] = 0
    assert 12_000 < find_pause(samples) < 15_200


def test_steady_sound_is_cut_late():
    """As few windows as can be: of equally quiet places the latest counts."""
    assert find_pause(np.zeros(LONGEST, np.float32)) > LONGEST * 0.85
