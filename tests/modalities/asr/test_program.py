"""The tiny Whisper gives transformers' own tokens: alone, among others, launched ahead, preempted, in every window."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.tasks import Heard
from polymux.modalities.asr.program import TranscriptionProgram
from polymux.modalities.asr.utterances import FRAME, Endpointing
from polymux.modalities.asr.windows import SpeechCutter, Window
from polymux.modalities.asr.work import AudioChunk, TranscribeWork, WindowText

both_devices = pytest.mark.parametrize("device", [Device, LaggedCpu])
"""Results at once, and one launch late."""


def cut(samples: np.ndarray) -> list[Window]:
    """The windows of a recording in which nobody is ever silent."""
    speech = np.ones(-(-len(samples) // FRAME))
    return list(SpeechCutter(16_000, Endpointing()).push(samples, speech, last=True))


def texts(driver, job):
    return driver.outputs(job, "window", WindowText)


@both_devices
def test_alone_and_among_others_the_tokens_are_those_of_generate(device, drive, transcribe, sound, reference):
    """Recordings of any length join and leave at any step; languages and tasks share launches."""
    sounds = [sound(seed, seconds=0.3 + 0.1 * seed) for seed in range(7)]
    languages = [("en", 82), ("de", 83), ("fr", 84)]
    driver = drive(device)
    expected = {}
    for number, samples in enumerate(sounds):
        code, id = languages[number % 3]
        task, task_id = [("transcribe", 86), ("translate", 85)][number % 2]
        expected[str(number)] = reference.generate(samples, [81, id, task_id])
        transcribe(driver, str(number), samples, task, language=code)
        driver.run(steps=number)
    driver.finish()
    for job, tokens in expected.items():
        assert texts(driver, job)[0].tokens == tokens, job
    assert len({tuple(tokens) for tokens in expected.values()}) > 3

    for number, samples in enumerate(sounds[:2]):
        alone = drive(device)
        code, _ = languages[number % 3]
        transcribe(alone, "one", samples, ["transcribe", "translate"][number % 2], language=code)
        alone.finish()
        assert texts(alone, "one")[0].tokens == expected[str(number)]


@both_devices
def test_preempted_rows_go_on_with_the_same_rules(device, drive, transcribe, sound, reference):
    """Too small a cache for all at once: rows are put back, their timestamp state is found again."""
    driver = drive(device, superpage=1 << 17, cache_bytes=(1 << 17) * 6)
    for seed in range(6):
        transcribe(driver, str(seed), sound(seed), language="en")
    driver.finish()
    for seed in range(6):
        assert texts(driver, str(seed))[0].tokens == reference.generate(sound(seed), [81, 82, 86])


@both_devices
def test_a_long_recording_is_its_windows(device, drive, transcribe, sound, reference):
    """Windows decode together, are told in order, and begin where they begin in the recording."""
    samples = sound(0, seconds=7.5)
    driver = drive(device)
    transcribe(driver, "long", samples, language="en")
    driver.finish()
    windows = cut(samples)
    found = texts(driver, "long")
    assert [window.start for window in windows] == [text.start for text in found]
    assert sum(text.count for text in found) == len(samples)
    for window, text in zip(windows, found):
        assert text.tokens == reference.generate(window.samples, [81, 82, 86])
    assert driver.outputs("long", "heard", Heard) == [Heard("en", 7.5)]


def test_the_language_is_the_likeliest_after_the_start(drive, transcribe, sound, reference):
    heard = set()
    for seed in range(5):
        logprobs = reference.logprobs(sound(seed), [81])
        language = ["en", "de", "fr"][int(logprobs[82:85].argmax())]
        driver = drive()
        transcribe(driver, "one", sound(seed))
        driver.finish()
        assert driver.outputs("one", "heard", Heard)[0].language == language
        heard.add(language)
        prompt = [81, {"en": 82, "de": 83, "fr": 84}[language], 86]
        assert texts(driver, "one")[0].tokens == reference.generate(sound(seed), prompt)


def test_the_prompt_comes_before_the_start(drive, transcribe, sound, reference):
    driver = drive()
    transcribe(driver, "one", sound(1), language="en", prompt=[10, 11, 12])
    transcribe(driver, "two", sound(1), language="en", prompt=[10, 11, 12], hotwords=[20, 21])
    driver.finish()
    assert texts(driver, "one")[0].tokens == reference.generate(sound(1), [87, 10, 11, 12, 81, 82, 86])
    assert texts(driver, "two")[0].tokens == reference.generate(sound(1), [87, 20, 21, 10, 11, 12, 81, 82, 86])


def test_silence_is_measured_where_the_decoder_starts(drive, transcribe, sound, reference):
    """The probability of <|nospeech|> before any rule, behind the prompt."""
    for prompt in ([], [10, 11]):
        driver = drive()
        transcribe(driver, "one", sound(2), language="de", prompt=prompt)
        driver.finish()
        told = [87, *prompt] if prompt else []
        expected = math.exp(reference.logprobs(sound(2), [*told, 81])[88])
        assert texts(driver, "one")[0].no_speech_prob == pytest.approx(expected, rel=1e-4)


def test_what_cannot_be_heard_is_not_decoded(drive, transcribe, sound):
    driver = drive()
    transcribe(driver, "silent", np.zeros(50_000, np.float32))
    mixed = np.concatenate([np.zeros(40_000, np.float32), sound(0)])
    transcribe(driver, "mixed", mixed, language="en")
    driver.finish()
    assert texts(driver, "silent") == []
    assert driver.outputs("silent", "heard", Heard) == [Heard("en", 3.125)]
    assert all(text.start + text.count > 40_000 for text in texts(driver, "mixed"))


@both_devices
@pytest.mark.parametrize("steps", [0, 1, 2, 3, 5, 8, 13])
def test_cancelled_at_any_step_nothing_is_left_and_others_go_on(device, steps, drive, transcribe, sound, reference):
    driver = drive(device)
    transcribe(driver, "leaver", sound(0, seconds=5.0))
    transcribe(driver, "stayer", sound(1), language="en")
    driver.run(steps=steps)
    driver.cancel("leaver")
    driver.finish()
    assert texts(driver, "stayer")[0].tokens == reference.generate(sound(1), [81, 82, 86])
    assert driver.receipt("leaver") is None


def test_windows_wait_for_the_rest_of_the_upload(drive, sound):
    """A recording may arrive in pieces of any size; the cuts are the same."""
    samples = sound(0, seconds=3.3)
    driver = drive()
    driver.submit("slow", "whisper", "transcribe", TranscribeWork(language="en"))
    for start in range(0, len(samples), 7_001):
        driver.post("slow", AudioChunk(samples[start : start + 7_001], last=False))
        driver.run()
    driver.post("slow", AudioChunk(np.empty(0, np.float32), last=True))
    driver.finish()
    whole = [window.start for window in cut(samples)]
    assert [text.start for text in texts(driver, "slow")] == whole


def test_many_long_recordings_cannot_starve_their_own_decoders(drive, transcribe, sound):
    """Slabs must not take all of the cache: what was encoded has to be decoded before more is."""
    driver = drive(superpage=1 << 17, cache_bytes=(1 << 17) * 5)
    for job in range(4):
        transcribe(driver, str(job), sound(job, seconds=6.0), language="en")
    driver.finish()
    for job in range(4):
        assert driver.error(str(job)) is None
        assert len(texts(driver, str(job))) >= 6


def test_all_of_a_window_is_heard_whatever_its_timestamps_end_with() -> None:
    """Each pass says that more follows, until the last."""
    stamp, heard = 90, []

    class Hearing:
        tokens = SimpleNamespace(first_stamp=stamp)

        async def hear(self, job, work, window, language, before, *, leads):
            heard.append((window.start, len(window.samples), leads))
            ends = [stamp + 500] * 2 if len(heard) < 3 else [stamp + 300]
            return WindowText(window.start, len(window.samples), [stamp, 7, *ends], 0.0, 0.0, 0.0)

    program = TranscriptionProgram.__new__(TranscriptionProgram)
    program.hearing = Hearing()
    window = Window(32_000, np.zeros(26 * 16_000, np.float32))
    strand = program._hear_out(None, TranscribeWork(), window, None, leads=True)
    with pytest.raises(StopIteration) as ended:
        strand.send(None)
    seconds = [(start // 16_000, count // 16_000, leads) for start, count, leads in heard]
    assert seconds == [(2, 26, True), (12, 16, False), (22, 6, False)]
    texts = ended.value.value
    assert [(text.start // 16_000, text.count // 16_000) for text in texts] == [(2, 10), (12, 10), (22, 6)]
    assert [text.tokens for text in texts] == [[stamp, 7, stamp + 500]] * 2 + [[stamp, 7, stamp + 300]]
