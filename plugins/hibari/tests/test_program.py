"""The engine says pieces in order, as the package itself would, beside whatever else runs; cancels free it."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hibari import Hibari
from polymux_hibari.front import SpeechFront
from polymux_hibari.program import Utterance, VoiceModel
from polymux_hibari.work import FRAME, SpeakWork

from polymux.core.batch.oneshot import AHEAD
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Speak
from polymux.core.testing.drive import Driver

TEXT = "One sentence. Another one, a little longer than the first! And a third?"


@pytest.fixture
def say(front: SpeechFront) -> Callable[..., None]:
    def submit(driver: Driver, job: str, text: str = TEXT, speed: float = 1.0) -> None:
        prepared = front.prepare("speak", Speak(text=text, speed=speed))
        driver.submit(job, "voice", "speak", prepared.work)
        for message in prepared.messages:
            driver.post(job, message)

    return submit


def sounds(driver: Driver, job: str) -> list[np.ndarray]:
    return [spoken.samples for spoken in driver.outputs(job, SPOKEN, Spoken)]


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_sentences_sound_as_in_the_package(drive: Callable[..., Driver], say: Callable[..., None], device) -> None:
    driver = drive(device)
    say(driver, "a")
    driver.finish()
    hibari = Hibari()
    expected = [hibari.from_phonemes(phonemes, 1.0, seed=0) for phonemes in hibari.phonemize(TEXT)]
    found = sounds(driver, "a")
    assert [len(samples) for samples in found] == [len(samples) for samples in expected]
    for samples, wanted in zip(found, expected):
        np.testing.assert_allclose(samples / 32767, wanted, atol=2e-5)
    receipt = driver.receipt("a")
    assert receipt is not None
    assert receipt.output_units == sum(map(len, expected)) // FRAME
    assert receipt.input_units == sum(map(len, hibari.phonemize(TEXT)))
    assert 0 < receipt.first_ms < receipt.total_ms


def test_the_same_alone_and_among_others(drive: Callable[..., Driver], say: Callable[..., None]) -> None:
    alone = drive()
    say(alone, "a")
    alone.finish()
    crowd = drive(LaggedCpu)
    for job, speed in (("b", 2.0), ("a", 1.0), ("c", 0.5)):
        say(crowd, job, speed=speed)
    crowd.finish()
    for mine, theirs in zip(sounds(alone, "a"), sounds(crowd, "a"), strict=True):
        assert np.array_equal(mine, theirs)


def test_voices_of_a_pass_are_what_they_are_alone(front: SpeechFront) -> None:
    """Several voices, each a network of its own, and several pieces of one, in any order."""
    voices = VoiceModel({"one": Hibari(), "two": Hibari()})
    ids = [front.prepare("speak", Speak(text=text)) for text in ("One sentence.", "Another.")]
    first, second = (next(iter(prepared.messages)).ids for prepared in ids)  # type: ignore[arg-type]
    spoken = [Utterance(first, "one", 1.0), Utterance(second, "two", 2.0), Utterance(second, "one", 1.0)]
    together = voices.forward(spoken, [])
    for utterance, samples in zip(spoken, together, strict=True):
        assert np.array_equal(voices.forward([utterance], [])[0], samples)


def test_texts_take_turns(drive: Callable[..., Driver], say: Callable[..., None]) -> None:
    """A long text that came first does not keep a short one waiting for its end."""
    driver = drive()
    say(driver, "long", TEXT * 4)
    say(driver, "short", "Hi.")
    while driver.receipt("short") is None:
        assert driver.step()
    assert len(sounds(driver, "long")) <= 2
    driver.cancel("long")
    driver.finish()


def test_a_cancel_stops_between_two_sentences(drive: Callable[..., Driver], say: Callable[..., None]) -> None:
    driver = drive()
    say(driver, "a", TEXT * 4)
    while not driver.reports["a"]:
        assert driver.step()
    driver.cancel("a")
    driver.finish()
    assert len(sounds(driver, "a")) == 1


def test_an_upload_that_never_ends_is_waited_for(drive: Callable[..., Driver]) -> None:
    driver = drive()
    driver.submit("a", "voice", "speak", SpeakWork("heart"))
    driver.run()
    assert driver.loop.jobs
    driver.cancel("a")
    driver.finish()


@pytest.mark.parametrize("text", ["Hi.", "A", "I", "...", "1"])
def test_the_shortest_texts_sound(drive: Callable[..., Driver], say: Callable[..., None], text: str) -> None:
    driver = drive()
    say(driver, "a", text)
    driver.finish()
    assert sum(map(len, sounds(driver, "a"))) > 2400


def test_speed(drive: Callable[..., Driver], say: Callable[..., None]) -> None:
    """Slower by the voice itself, which counts in frames; faster to the sample."""
    driver = drive()
    text = "The quick brown fox jumps over the lazy dog."
    for speed in (0.25, 0.5, 1.0, 1.25, 2.0, 4.0):
        say(driver, str(speed), text, speed)
    driver.finish()
    lengths = {speed: len(sounds(driver, str(speed))[0]) for speed in (0.25, 0.5, 1.0, 1.25, 2.0, 4.0)}
    for speed, length in lengths.items():
        assert length == pytest.approx(lengths[1.0] / speed, rel=0.03 if speed < 1 else 0, abs=0.5), speed


def test_the_first_sound_comes_before_what_others_say_next(
    drive: Callable[..., Driver], say: Callable[..., None]
) -> None:
    """Eight texts have begun and wait for their second piece: a ninth waits for those under way alone."""
    driver = drive()
    early = [str(number) for number in range(8)]
    for job in early:
        say(driver, job, TEXT * 2)
    while not all(driver.reports[job] for job in early):
        assert driver.step()
    before = sum(len(driver.reports[job]) for job in early)
    say(driver, "late", "Hi.")
    while not driver.reports["late"]:
        assert driver.step()
    said = sum(len(driver.reports[job]) for job in early) - before
    assert said <= 2 * (torch.get_num_threads() + AHEAD)
    for job in early:
        driver.cancel(job)
    driver.finish()


def submit(driver: Driver, front: SpeechFront, job: str, ask: Speak) -> None:
    prepared = front.prepare("speak", ask)
    driver.submit(job, "voice", "speak", prepared.work)
    for message in prepared.messages:
        driver.post(job, message)


def test_words_are_told_when_they_begin(drive: Callable[..., Driver], front: SpeechFront) -> None:
    driver = drive()
    text = "<speak>One two. <break time='500ms'/>Three four.</speak>"
    submit(driver, front, "a", Speak(text=text, kind="ssml"))
    driver.finish()
    told = [word for spoken in driver.outputs("a", SPOKEN, Spoken) for word in spoken.words]
    assert "".join(word.text for word in told) == "One two. Three four."
    assert all(one.start < one.end <= two.start for one, two in itertools.pairwise(told))
    assert told[2].start - told[1].end >= 0.5
    silent = sounds(driver, "a")[1]
    assert len(silent) == 12_000
    assert not silent.any()


def test_phonemes_are_said_as_they_are(drive: Callable[..., Driver], front: SpeechFront) -> None:
    driver = drive()
    submit(driver, front, "text", Speak(text="Hello there."))
    submit(driver, front, "phonemes", Speak(text=front.readers["heart"]("Hello there."), kind="phonemes"))
    driver.finish()
    for one, two in zip(sounds(driver, "text"), sounds(driver, "phonemes"), strict=True):
        assert np.array_equal(one, two)


def test_loudness_is_sane_and_joints_are_quiet(drive: Callable[..., Driver], say: Callable[..., None]) -> None:
    """Nothing is cut at full scale, speech is neither faint nor shouted, and where pieces meet nothing clicks."""
    driver = drive()
    say(driver, "a")
    driver.finish()
    parts = [samples / 32767 for samples in sounds(driver, "a")]
    joined = np.concatenate(parts)
    assert np.abs(joined).max() < 0.99
    assert -35 < 20 * np.log10(np.sqrt(np.mean(joined**2))) < -12
    for part in parts:
        assert max(np.abs(part[:24]).max(), np.abs(part[-24:]).max()) < 0.02
