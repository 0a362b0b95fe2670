"""The parts of a start are its whole: what lies inside another is counted once."""

from __future__ import annotations

import threading
import time

import pytest

from polymux.core.stopwatch import part, stopwatch


def test_parts_inside_each_other_keep_what_is_their_own() -> None:
    began = time.monotonic()
    with stopwatch() as parts, part("outer"):
        time.sleep(0.02)
        for _ in range(2):
            with part("inner"):
                time.sleep(0.03)
    whole = time.monotonic() - began
    assert parts["inner"] >= 0.06
    assert 0.02 <= parts["outer"] <= whole - parts["inner"] + 0.002
    assert sum(parts.values()) == pytest.approx(whole, abs=0.02)


def test_a_part_that_fails_is_measured() -> None:
    with pytest.raises(ValueError, match="so"), stopwatch() as parts, part("failing"):
        time.sleep(0.01)
        raise ValueError("so")
    assert parts["failing"] >= 0.01


def test_a_thread_beside_is_no_part() -> None:
    def work() -> None:
        with part("beside"):
            time.sleep(0.01)

    with stopwatch() as parts, part("here"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert parts.keys() == {"here"}
