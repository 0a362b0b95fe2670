"""When one utterance is looked at, and what becomes of looks that came too early or do not end."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from polymux.core.batch.oneshot import OneShotModel, OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.tasks import Commit, Committed, Hear, Leave, Turns
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_whisper
from polymux.modalities.asr.activity import open_activity
from polymux.modalities.asr.alignment import Aligner, choose_heads, open_alignment
from polymux.modalities.asr.desk import Desk
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.policies import AlignAtt
from polymux.modalities.asr.program import TranscriptionProgram
from polymux.modalities.asr.scribe import Scribe
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import FRAME, RATE
from polymux.modalities.asr.whisper import split_whisper
from polymux.modalities.asr.work import ListenWork


def five_seconds() -> torch.nn.Module:
    """The tiny Whisper with windows of five seconds."""
    config = tiny_whisper().config
    config.max_source_positions = 250
    return WhisperForConditionalGeneration(config)


@pytest.fixture
def looks(monkeypatch) -> list[tuple[float, bool, bool]]:
    """Of every pass that ended: how many seconds it heard, whether for last words, whether it was cut short."""
    found = []
    transcribe = Scribe._transcribe

    async def note(scribe, samples, frames, final):
        hypothesis = await transcribe(scribe, samples, frames, final)
        found.append((round(len(samples) / RATE, 1), final, scribe._stopped))
        return hypothesis

    monkeypatch.setattr(Scribe, "_transcribe", note)
    return found


@pytest.fixture
def listen(tokens: SpeechTokens, detector: OneShotModel) -> Callable[..., Driver]:
    """A loop with one job that listens; utterances end after half a second of silence. Where no token `begins` a word,
    nothing is certain before the end."""

    def open_job(begins: bool = True) -> Driver:
        model = build(five_seconds, seed=3)
        site = Site(settings=SiteSettings(max_rows=6, block=4, cache_bytes=1 << 24, superpage=1 << 18))
        encoder, decoder = split_whisper(model)
        encode = OneShotStage("encode", encoder, site, max_units=4, max_rows=4)
        decode = TokenStage("decode", decoder, site)
        align = open_alignment(Aligner(decoder, choose_heads(None, 3, 4), site), site)
        desk = Desk(encode, decode, tokens, "tiny", encoder.frames, lambda: AlignAtt(lambda token: begins), align)
        hearing = Hearing(encode, decode, tokens, "tiny", None, align)
        program = TranscriptionProgram(hearing, open_activity(detector, site), encoder.samples, desk)
        driver = Driver(Loop(site, {"whisper": program}))
        driver.submit("one", "whisper", "listen", ListenWork(language="en", turns=Turns()))
        return driver

    return open_job


def speak(driver: Driver, sound, *stretches: float) -> None:
    """Seconds of speech and of silence, in turn."""
    pieces = [
        sound(place, seconds) if place % 2 == 0 else np.zeros(int(seconds * RATE), np.float32)
        for place, seconds in enumerate(stretches)
    ]
    driver.post("one", Hear(np.concatenate(pieces)))


def test_before_the_first_words_looks_follow_soon(listen, sound, looks):
    driver = listen(begins=False)
    for _ in range(15):
        speak(driver, sound, 0.1)
        driver.run()
    lengths = [length for length, final, _ in looks if not final]
    assert lengths[0] == pytest.approx(0.8, abs=0.1)
    assert lengths[1] - lengths[0] == pytest.approx(0.3, abs=0.15)
    driver.post("one", Leave())
    driver.finish()


def test_a_look_that_misses_speech_ends_where_it_gets_quiet(listen, sound, looks):
    """What is said last is heard at once: not behind a look that is out of date, nor only when the turn is over."""
    driver = listen()
    speak(driver, sound, 1.0)
    while not driver.loop.scheduler.stats()["rows_running"]:
        driver.step()
    assert not looks
    speak(driver, sound, 0.5, 0.25)
    driver.run()
    (_, final, stopped), *later = looks
    assert not final and stopped
    assert later and all(final for _, final, _ in later)
    driver.post("one", Leave())
    driver.finish()


def test_a_window_that_is_settled_is_not_given_up_for_what_follows(listen, sound, looks):
    """More was said than a window holds: what is cut off is heard to its end, however soon it gets quiet."""
    driver = listen()
    speak(driver, sound, 4.5)
    while not driver.loop.scheduler.stats()["rows_running"]:
        driver.step()
    speak(driver, sound, 0.5, 0.7)
    driver.run()
    assert looks[0][1:] == (True, False)
    assert looks[0][0] >= 1.0, "the window that was cut off"
    driver.post("one", Leave())
    driver.finish()


def test_looks_that_do_not_end_are_no_last_words(listen, sound, looks):
    """A random model never ends: what it says while somebody speaks may count, and is heard again for last words."""
    driver = listen()
    while not looks:
        speak(driver, sound, 0.1)
        driver.run()
    driver.post("one", Hear(np.zeros(3 * RATE // 10, np.float32)))
    driver.run()
    assert [final for _, final, _ in looks][:2] == [False, True], "it got quiet: heard once more, before the turn ends"
    driver.post("one", Leave())
    driver.finish()


def test_sound_that_came_meanwhile_is_heard_in_one_pass(listen, sound, monkeypatch):
    """Two seconds in twenty messages: whoever is late catches up, and does not ask for one pass after the other."""
    driver = listen()
    passes = []
    stage = driver.loop.programs["whisper"].stages[0]
    launch = stage.launch
    monkeypatch.setattr(stage, "launch", lambda plan: passes.append(plan.units) or launch(plan))
    for _ in range(20):
        speak(driver, sound, 0.1)
    driver.post("one", Leave())
    driver.finish()
    assert passes == [2 * RATE // FRAME]


def test_a_commit_between_sound_ends_what_came_before_it(listen, sound):
    """However late all of it is heard."""
    driver = listen()
    driver.post("one", ListenWork(language="en", turns=None))
    for seconds in (0.5, 0.7, 0.3):
        for _ in range(int(seconds * 10)):
            speak(driver, sound, 0.1)
        driver.post("one", Commit())
    driver.post("one", Leave())
    driver.finish()
    committed = driver.outputs("one", Committed.__name__, Committed)
    assert [each.seconds for each in committed] == pytest.approx([0.5, 0.7, 0.3])
