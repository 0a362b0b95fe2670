"""A text that cannot be trusted is tried again, on the encoder's one pass, and alike in every mix of requests."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from polymux.core.compute.device import Device, LaggedCpu
from polymux.modalities.asr.fallback import Attempt, Fallback, choose_attempt, measure_repetition
from polymux.modalities.asr.whisper import WhisperEncoder
from polymux.modalities.asr.work import WindowText

EAGER = Fallback(lambda tokens: " ".join(map(str, tokens)), temperatures=(0.5, 1.0), draws=3)
PROMPT = [81, 82, 86]
CONTEXT = 64


def attempt(confidence: float, repetition: float = 1.0, no_speech: float = 0.0, temperature: float = 0.0) -> Attempt:
    return Attempt([], temperature, confidence, repetition, no_speech)


def text(driver, job: str) -> WindowText:
    (only,) = driver.outputs(job, "window", WindowText)
    return only


def test_what_settles_a_window():
    assert attempt(-0.5).settled
    assert not attempt(-1.5).settled
    assert not attempt(-0.5, repetition=3.0).settled
    assert attempt(-1.5, no_speech=0.7).settled and attempt(-1.5, no_speech=0.7).silent
    assert not attempt(-0.5, repetition=3.0, no_speech=0.7).silent  # whisper 1903: repetition is no silence


def test_the_first_settled_text_counts_else_the_surest_that_does_not_repeat_itself():
    assert choose_attempt([attempt(-2.0), attempt(-0.9, temperature=0.2)]).temperature == 0.2
    doubtful = [attempt(-1.1, repetition=5.0), attempt(-1.9, temperature=0.2), attempt(-3.0, temperature=0.4)]
    assert choose_attempt(doubtful).temperature == 0.2


def test_repetition_is_told_from_speech():
    assert measure_repetition(" Thanks for watching." * 20) > 2.4
    assert measure_repetition("The quick brown fox jumps over the lazy dog while nobody is looking.") < 2.4
    assert measure_repetition("") == 0.0


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_in_every_mix_the_same_text_from_one_pass_of_the_encoder(
    device, drive, transcribe, sound, reference, monkeypatch
):
    """Attempts of many windows share launches; each one's confidence is what transformers makes of its tokens."""
    encoded: Counter[bytes] = Counter()
    forward = WhisperEncoder.forward

    def count(self, items, slabs):
        encoded.update(item.tobytes() for item in items)
        return forward(self, items, slabs)

    monkeypatch.setattr(WhisperEncoder, "forward", count)
    driver = drive(device, fallback=EAGER)
    for seed in range(6):
        transcribe(driver, str(seed), sound(seed), language="en")
        driver.run(steps=3 * seed)
    driver.finish()
    assert list(encoded.values()) == [1] * 6
    found = [text(driver, str(seed)) for seed in range(6)]
    assert {window.temperature for window in found} - {0.0}, "no window fell back"
    for seed, window in enumerate(found):
        greedy = reference.generate(sound(seed), PROMPT)
        if window.temperature == 0.0:
            assert window.tokens == greedy
        elif window.avg_logprob < -1.0:
            assert window.avg_logprob >= reference.confidence(sound(seed), PROMPT, greedy) - 1e-4
        ended = [] if len(window.tokens) == CONTEXT - len(PROMPT) else [80]
        expected = reference.confidence(sound(seed), PROMPT, [*window.tokens, *ended])
        assert window.avg_logprob == pytest.approx(expected, abs=1e-3)

    for seed in (1, 4):
        alone = drive(fallback=EAGER)
        transcribe(alone, "one", sound(seed), language="en")
        alone.finish()
        assert text(alone, "one").tokens == found[seed].tokens


def test_a_temperature_that_was_asked_for_stays(drive, transcribe, sound):
    driver = drive(fallback=EAGER)
    transcribe(driver, "one", sound(1), language="en", temperature=0.25)
    driver.finish()
    assert text(driver, "one").temperature == 0.25


@pytest.mark.parametrize("device", [Device, LaggedCpu])
@pytest.mark.parametrize("steps", [10, 25, 40])
def test_in_a_small_cache_and_cancelled_between_attempts_nothing_is_left(device, steps, drive, transcribe, sound):
    """Whatever is heard repeats itself: every window is tried to the end."""
    doubtful = replace(EAGER, decode=lambda tokens: "na " * 400)
    driver = drive(device, fallback=doubtful, superpage=1 << 17, cache_bytes=(1 << 17) * 5)
    for seed in range(3):
        transcribe(driver, str(seed), sound(seed, seconds=2.5), language="en")
    driver.run(steps=steps)
    driver.cancel("0")
    driver.finish()
    assert driver.receipt("0") is None
    for seed in (1, 2):
        assert driver.error(str(seed)) is None
        assert driver.outputs(str(seed), "window", WindowText)
