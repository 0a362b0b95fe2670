"""Text becomes pieces of phonemes: nothing speakable is lost, early sound is short, bad input is the user's to fix."""

from __future__ import annotations

import math

import pytest
from hibari import Hibari
from hypothesis import given, settings
from hypothesis import strategies as st
from polymux_hibari.front import FIRST, LONGEST, SpeechFront

from polymux.core.errors import InvalidRequest
from polymux.core.speech.script import Say
from polymux.core.tasks import Speak

TEXT = "Dr. Smith paid $9.99 at 7:30 pm. “Why?” she asked.\n\nNobody knew; it was the 3rd of March 2024, after all!"


def read(front: SpeechFront, text: str) -> list[str]:
    """The phonemes of each piece."""
    phonemes = {id: phoneme for phoneme, id in front.vocabulary.items()}
    return ["".join(phonemes[id] for id in piece.ids[1:-1]) for piece in front.read([Say(text)], "heart")]


@pytest.fixture(scope="module")
def hibari() -> Hibari:
    return Hibari()


def test_pieces_are_the_packages_own_where_it_cuts_alike(front: SpeechFront, hibari: Hibari) -> None:
    text = "Dr. Smith paid $9.99 at 7:30 pm. Nobody knew why. It was the 3rd of March!"
    assert read(front, text) == hibari.phonemize(text)


@pytest.mark.parametrize("text", [TEXT, "word " * 300, "1234567890 " * 40, "x" * 4096, "9" * 5000, "a,b;c " * 200])
def test_pieces_are_short(front: SpeechFront, text: str) -> None:
    pieces = read(front, text)
    assert len(pieces[0]) <= FIRST
    assert all(len(piece) <= LONGEST for piece in pieces)


def test_a_sentence_that_is_cut_is_the_whole_sentence(front: SpeechFront) -> None:
    text = "she sells sea shells, and he sells boats; " * 20
    assert "".join(read(front, text)) == front.readers["heart"](text)


def test_what_the_package_cannot_read_costs_only_itself(front: SpeechFront) -> None:
    (around,) = read(front, "before <¹ after")
    assert around.startswith("bəfˈɔɹ")
    assert around.endswith("ˈæftəɹ")


@pytest.mark.parametrize(
    ("word", "parts"),
    [
        ("supercalifragilistic" * 5, 5),
        ("Donaudampfschifffahrtsgesellschaft", 2),
        ("internationalization" * 40, 34),
    ],
)
def test_long_words_are_read_to_their_end(front: SpeechFront, word: str, parts: int) -> None:
    """The network that reads unknown words takes 24 letters; what stood behind them was silent."""
    assert sum(map(len, read(front, word))) > 0.6 * len(word)
    assert len(word) / parts <= 24


@pytest.mark.parametrize("text", ["hello 5", "həlˈO 日"])
def test_phonemes_that_the_voice_lacks_are_refused(front: SpeechFront, text: str) -> None:
    with pytest.raises(InvalidRequest, match=text[-1]) as refused:
        front.prepare("speak", Speak(text=text, kind="phonemes"))
    assert refused.value.param == "input"
    front.prepare("speak", Speak(text="həlˈO wˈɜɹld\n", kind="phonemes"))


@pytest.mark.parametrize("text", ["", " ", "\n\t ", "😀", "👩‍👩‍👧🎉 😀", "日本語", "\x00\x01", "\u200b"])
def test_nothing_to_say_is_refused(front: SpeechFront, text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        front.prepare("speak", Speak(text=text))
    assert refused.value.param == "input"


@pytest.mark.parametrize("speed", [0.0, 0.2499, 4.001, 99.0, -1.0, math.nan, math.inf])
def test_speeds_that_cannot_be_spoken(front: SpeechFront, speed: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        front.prepare("speak", Speak(text="Hello.", speed=speed))
    assert refused.value.param == "speed"


def test_voices(front: SpeechFront) -> None:
    assert front.describe()["voices"] == ["heart"]
    assert front.prepare("speak", Speak(text="Hello.", voice="alloy")).work.voice == "heart"
    with pytest.raises(InvalidRequest, match="this model has: heart") as refused:
        front.prepare("speak", Speak(text="Hello.", voice="nobody"))
    assert refused.value.param == "voice"


def test_words_with_a_sound_of_their_own(front: SpeechFront) -> None:
    assert read(front, "Say [hibari](/hibˈɑɹi/) now.") == ["sˈA hibˈɑɹi nˈW."]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=120))
def test_any_text_is_read_or_refused(front: SpeechFront, text: str) -> None:
    pieces = list(front.read([Say(text)], "heart"))
    assert all(2 < len(piece.ids) <= LONGEST + 2 for piece in pieces)
    assert all(id >= 0 for piece in pieces for id in piece.ids)
