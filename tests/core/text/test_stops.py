"""Stop strings cut at the right character, however the text was split, and never swallow text."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polymux.core.text.stops import StopStrings


def cut(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule in one line: at the first character where a stop string completes, the longest one is removed."""
    for end in range(len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end - len(stop)], stop
    return text, None


@given(
    pieces=st.lists(st.text("ab.", max_size=4), max_size=12),
    stops=st.lists(st.text("ab.", min_size=1, max_size=5), max_size=4),
)
def test_pieces_do_not_matter(pieces: list[str], stops: list[str]):
    watch, shown = StopStrings(stops), ""
    for piece in pieces:
        shown += watch.push(piece)
        if watch.matched is None:
            seen = "".join(pieces)[: len(shown) + len(watch._held)]
            longest = max((k for stop in stops for k in range(len(stop)) if seen.endswith(stop[:k])), default=0)
            assert len(watch._held) == longest, "holds back exactly what may become a stop string"
    shown += watch.flush()
    assert (shown, watch.matched) == cut("".join(pieces), stops)


def test_a_false_start_is_released():
    watch = StopStrings(["\n\nUser:"])
    assert [watch.push(piece) for piece in ("Hi", "\n", "\nUs", "age")] == ["Hi", "", "", "\n\nUsage"]


def test_held_text_is_not_lost_at_the_end():
    watch = StopStrings(["END"])
    assert watch.push("the EN") == "the "
    assert watch.flush() == "EN"


def test_nothing_follows_a_match():
    watch = StopStrings(["b"])
    assert (watch.push("abc"), watch.push("more"), watch.flush(), watch.matched) == ("a", "", "", "b")


def test_work_per_character_does_not_grow_with_the_stop_string():
    """A long, self-similar stop string against its own near-match: quadratic matching would take minutes."""
    watch = StopStrings(["a" * 4000 + "b"])
    assert len(watch.push("a" * 200_000)) == 196_000
