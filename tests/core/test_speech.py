"""What every voice shares: scripts and SSML, words in the sound's own clock, another pace at the same pitch."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.engine.wire import pack
from polymux.core.errors import InvalidRequest
from polymux.core.speech.presenter import SpeechPresenter
from polymux.core.speech.script import Pause, Say, read_script
from polymux.core.speech.stretch import Stretcher, share_pace, stretch
from polymux.core.speech.telling import SPOKEN, Spoken, quantize, share_words, split_words
from polymux.core.tasks import Speak, SpokenWord
from polymux.core.text.sentences import cut_text, split_sentences
from polymux.core.vocabulary import Output

RATE = 24_000


def ssml(inner: str, **more: Any) -> list[Say | Pause]:
    return read_script(Speak(text=f"<speak>{inner}</speak>", kind="ssml", **more))


def test_plain_text_and_phonemes_are_left_alone() -> None:
    assert read_script(Speak(text="a < b & c", speed=2.0)) == [Say("a < b & c", 2.0)]
    assert read_script(Speak(text="həlˈO", kind="phonemes")) == [Say("həlˈO", 1.0, phonemes=True)]


def test_breaks_paces_substitutes_and_spellings() -> None:
    assert ssml("One.<break time='300ms'/>Two.") == [Say("One."), Pause(0.3), Say("Two.")]
    assert ssml("a<break time='1.5s'/>b<break strength='strong'/>") == [Say("a"), Pause(1.5), Say("b"), Pause(0.8)]
    assert ssml("a <prosody rate='200%'>b <prosody rate='0.5'>c</prosody></prosody>") == [
        Say("a "),
        Say("b ", 2.0),
        Say("c", 1.0),
    ]
    assert ssml("<prosody rate='-25%'>x</prosody>", speed=2.0) == [Say("x", 1.5)]
    assert ssml("The <sub alias='World Wide Web'>WWW</sub> now") == [Say("The World Wide Web now")]
    assert ssml("<say-as interpret-as='characters'>abc</say-as>") == [Say("A, B, C")]
    assert ssml("<say-as interpret-as='digits'>4 07</say-as>") == [Say("4, 0, 7")]
    assert ssml("<p>One.</p><p>Two &amp; three.</p>") == [Say("One."), Pause(0.6), Say("Two & three."), Pause(0.6)]
    spaced = "<speak version='1.0' xmlns='http://www.w3.org/2001/10/synthesis' xml:lang='en'>x</speak>"
    assert read_script(Speak(text=spaced, kind="ssml")) == [Say("x")]


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("plain text", "well-formed"),
        ("<speak>open", "well-formed"),
        ("<p>x</p>", "one speak element"),
        ("<speak><speak>x</speak></speak>", "one speak element"),
        ("<speak><audio src='x'/></speak>", "'audio' is not supported"),
        ("<speak><voice name='x'>y</voice></speak>", "'voice' is not supported"),
        ("<speak><prosody pitch='high'>x</prosody></speak>", "'pitch' of prosody"),
        ("<speak><prosody rate='fast' volume='loud'>x</prosody></speak>", "'volume' of prosody"),
        ("<speak><prosody rate='-100%'>x</prosody></speak>", "nothing is said"),
        ("<speak><prosody rate='quick'>x</prosody></speak>", "is no percentage"),
        ("<speak><prosody rate='900%'>x</prosody></speak>", "speed must be"),
        ("<speak><break time='soon'/></speak>", "no number of ms or s"),
        ("<speak><break time='11s'/></speak>", "longer than 10"),
        ("<speak><break time='1s'>x</break></speak>", "holds nothing"),
        ("<speak><say-as interpret-as='date'>1</say-as></speak>", "'date' is not supported"),
        ("<speak><sub>x</sub></speak>", "needs alias"),
        ("<!DOCTYPE speak [<!ENTITY a 'b'>]><speak>&a;</speak>", "declarations"),
        ("<speak>&unknown;</speak>", "well-formed"),
    ],
)
def test_what_cannot_be_spoken_is_refused_by_name(document: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says) as refused:
        read_script(Speak(text=document, kind="ssml"))
    assert refused.value.param == "input"


def test_a_document_deeper_than_the_stack() -> None:
    assert read_script(Speak(text="<speak>" + "<p>" * 2000 + "x" + "</p>" * 2000 + "</speak>", kind="ssml"))[0] == Say(
        "x"
    )


@pytest.mark.parametrize("speed", [0.0, 0.2499, 4.001, -1.0, math.nan, math.inf])
def test_paces_that_cannot_be_spoken(speed: float) -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_script(Speak(text="x", speed=speed))
    assert refused.value.param == "speed"


def test_a_kind_that_nobody_knows() -> None:
    with pytest.raises(InvalidRequest) as refused:
        read_script(Speak(text="x", kind="html"))
    assert refused.value.param == "input_type"


@given(st.text(max_size=400), st.integers(1, 60))
def test_no_text_is_ever_lost(text: str, longest: int) -> None:
    """Sentences, their parts and their words, joined again, are the text to the last character."""
    sentences = split_sentences(text)
    assert "".join(sentences) == text
    for sentence in sentences:
        parts = cut_text(sentence, longest)
        assert "".join(parts) == sentence
        assert all(0 < len(part) <= longest for part in parts)
    assert "".join(split_words(text)) == text
    assert "".join(word.text for word in share_words(text, 3.0)) == text


def test_words_share_their_sound_in_order() -> None:
    words = share_words("a  longer word", 2.0)
    assert [word.text for word in words] == ["a  ", "longer ", "word"]
    assert words[0].start == 0.0
    assert words[-1].end == 2.0
    assert all(one.start < one.end <= two.start for one, two in itertools.pairwise(words))


@pytest.mark.parametrize("pace", [0.25, 0.4, 0.9, 1.5, 2.5, 4.0])
def test_another_pace_keeps_pitch_length_and_smoothness(pace: float) -> None:
    """However the sound is cut: as long as asked to the sample, the same tone, and no click at any joint."""
    tone = (np.sin(np.arange(2 * RATE) * 2 * np.pi * 220 / RATE) * 0.3).astype(np.float32)
    stretcher = Stretcher(RATE, pace)
    parts = [stretcher.feed(tone[start : start + 4_321]) for start in range(0, len(tone), 4_321)]
    found = np.concatenate([*parts, stretcher.finish()])
    assert len(found) == round(len(tone) / pace)
    power = np.abs(np.fft.rfft(found * np.hanning(len(found)))) ** 2
    assert power.argmax() * RATE / len(found) == pytest.approx(220, abs=3)
    steps = np.abs(np.diff(found[: -RATE // 50]))  # the tone's own are 0.017; windows overlap with the end of it
    assert steps.max() < 0.03
    assert len(Stretcher(RATE, pace).finish()) == 0


@pytest.mark.parametrize("pace", [0.25, 0.6, 1.3, 2.5, 4.0])
@pytest.mark.parametrize("count", [400, 1_000, 3_000, 24_000])
def test_no_end_is_lost_however_short_the_sound(pace: float, count: int) -> None:
    tone = (np.sin(np.arange(count) * 2 * np.pi * 220 / RATE) * 0.3).astype(np.float32)
    found = stretch(tone, RATE, pace)
    assert len(found) == round(count / pace)
    heard = np.flatnonzero(np.abs(found) > 0.01)
    assert np.abs(found).max() > 0.25
    assert len(found) - heard[-1] < (1_000 if pace < 1 else 30)  # a filter's last window is as long as it came


@pytest.mark.parametrize("pace", [0.25, 1.0, 1.7, 4.0])
def test_a_voice_does_its_part_of_a_pace(pace: float) -> None:
    own, rest = share_pace(pace, fastest=1.5)
    assert own * rest == pytest.approx(pace)
    assert own <= 1.5 and rest >= 1.0
    assert len(stretch(np.zeros(1001, np.float32), RATE, rest)) == round(1001 / rest)


def test_sound_that_is_no_sound_is_silent_or_cut() -> None:
    assert quantize(np.array([0.5, 2.0, -3.0, np.nan, np.inf], np.float32)).tolist() == [16384, 32767, -32767, 0, 32767]


def test_the_first_sound_is_short_whatever_a_voice_tells_at_once() -> None:
    """Encoding a whole sentence before its beginning is sent would hold that up. Nothing is lost, or told twice."""
    presenter = SpeechPresenter(1000)
    words = [SpokenWord("one ", 0.0, 0.2), SpokenWord("two ", 0.24, 0.5), SpokenWord("three", 0.5, 0.9)]
    samples = np.arange(1000, dtype=np.int16)
    told = [Output("a", SPOKEN, pack(Spoken(samples, words))), Output("a", SPOKEN, pack(Spoken(samples)))]
    sounds = [sound for event in told for sound in presenter.feed(event)]
    assert [len(sound.data) // 2 for sound in sounds] == [250, 750, 1000]
    assert b"".join(sound.data for sound in sounds) == samples.tobytes() * 2
    assert [[word.text for word in sound.words] for sound in sounds] == [["one ", "two "], ["three"], []]
    assert len(SpeechPresenter(1000).feed(Output("a", SPOKEN, pack(Spoken(samples[:499]))))) == 1
