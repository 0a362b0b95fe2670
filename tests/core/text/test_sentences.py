"""Pieces for a voice: no character is ever lost, and cuts fall where a reader would breathe."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.text.sentences import cut_text, split_sentences

SENTENCES = [
    ("One. Two! Three?", ["One. ", "Two! ", "Three?"]),
    ("Dr. Smith met J. K. Rowling. She smiled.", ["Dr. Smith met J. K. Rowling. ", "She smiled."]),
    ("It costs 3.50 dollars, e.g. today.", ["It costs 3.50 dollars, e.g. today."]),
    ("“Stop!” he said. “Why?” Because.", ["“Stop!” he said. ", "“Why?” ", "Because."]),
    ("Wait... what? Yes…  No.", ["Wait... what? ", "Yes…  ", "No."]),
    (
        "A title\n\nand a text\nthat is wrapped.\nNew line",
        ["A title\n\n", "and a text\nthat is wrapped.\n", "New line"],
    ),
    ("彼は言った。「はい！」そして。", ["彼は言った。", "「はい！」", "そして。"]),
    ("  . leading", ["  . leading"]),
    ("It was I.\nThen you.", ["It was I.\n", "Then you."]),
    ("no mark at all", ["no mark at all"]),
    ("", []),
]


@pytest.mark.parametrize(("text", "pieces"), SENTENCES, ids=[text[:20] for text, _ in SENTENCES])
def test_sentences(text: str, pieces: list[str]) -> None:
    assert split_sentences(text) == pieces


@given(st.text(alphabet="aAI .,!?\n\r…”\"'。！é😀-1Dr", max_size=60))
def test_no_character_is_lost(text: str) -> None:
    assert "".join(split_sentences(text)) == text
    assert all(split_sentences(text))


@given(st.text(alphabet="ab, .;—", max_size=80), st.integers(1, 20))
def test_cuts_lose_nothing_and_keep_the_bound(text: str, longest: int) -> None:
    pieces = cut_text(text, longest)
    assert "".join(pieces) == text
    assert all(0 < len(piece) <= longest for piece in pieces)


def test_cuts_prefer_a_clause_then_a_space() -> None:
    assert cut_text("first part, and then the second part", 20) == ["first part, ", "and then the second ", "part"]
    assert cut_text("abcdefgh", 3) == ["abc", "def", "gh"]
    assert cut_text("short", 10) == ["short"]
