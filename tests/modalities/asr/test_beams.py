"""Beam search finds transformers' own text, alone and in every mix, and leaves nothing behind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import GenerationMixin

from polymux.core.compute.device import Device, LaggedCpu
from polymux.modalities.asr.fallback import Fallback
from polymux.modalities.asr.work import WindowText

both_devices = pytest.mark.parametrize("device", [Device, LaggedCpu])
BEAMS = (2, 3, 5)


def search(reference, samples: np.ndarray, prompt: list[int], beams: int) -> list[int]:
    """transformers' text; logits are renormalised behind the rules, as OpenAI's own decoder does it."""
    tokens = GenerationMixin.generate(
        reference.model,
        reference._features(samples),
        decoder_input_ids=torch.tensor([prompt]),
        logits_processor=reference._rules(len(prompt)),
        max_length=reference.model.config.max_target_positions,
        do_sample=False,
        num_beams=beams,
        renormalize_logits=True,
        early_stopping=False,
    )
    return [token for token in tokens[0, len(prompt) :].tolist() if token != 80]


@both_devices
def test_the_text_of_transformers_alone_and_among_others(device, drive, transcribe, sound, reference):
    """Greedy and beam searches of several widths share launches; recordings join at any step."""
    driver = drive(device)
    expected, greedy = {}, 0
    for number in range(6):
        samples, beams = sound(number, seconds=0.4 + 0.1 * number), BEAMS[number % 3]
        code, id = [("en", 82), ("de", 83)][number % 2]
        expected[str(number)] = search(reference, samples, [81, id, 86], beams)
        greedy += expected[str(number)] != reference.generate(samples, [81, id, 86])
        transcribe(driver, str(number), samples, language=code, beam_size=beams)
        transcribe(driver, f"greedy {number}", samples, language=code)
        driver.run(steps=5 * number)
    driver.finish()
    for job, tokens in expected.items():
        (window,) = driver.outputs(job, "window", WindowText)
        assert window.tokens == tokens, job
    assert greedy > 1, "beams found nothing that following the likeliest does not"


def test_the_surest_text_is_at_least_as_sure_as_the_greedy_one(drive, transcribe, sound):
    found = {}
    for beams in (1, 4):
        driver = drive()
        transcribe(driver, "one", sound(2), language="en", beam_size=beams)
        driver.finish()
        (found[beams],) = driver.outputs("one", "window", WindowText)
    assert found[4].avg_logprob >= found[1].avg_logprob
    assert found[1].no_speech_prob == pytest.approx(found[4].no_speech_prob, abs=1e-6)


def test_what_beams_find_may_still_be_drawn_again(drive, transcribe, sound):
    """The fallback begins with the beam search's text in place of the greedy one."""
    driver = drive(fallback=Fallback(lambda tokens: "ha" * 500, draws=2))
    transcribe(driver, "one", sound(1), language="en", beam_size=3)
    driver.finish()
    (window,) = driver.outputs("one", "window", WindowText)
    assert window.temperature in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)


@pytest.mark.parametrize("steps", [3, 9, 20])
def test_cancelled_in_a_small_cache_nothing_is_left(steps, drive, transcribe, sound, reference):
    driver = drive(LaggedCpu, superpage=1 << 17, cache_bytes=(1 << 17) * 6)
    transcribe(driver, "gone", sound(0), language="en", beam_size=5)
    transcribe(driver, "stays", sound(3), language="en", beam_size=3)
    driver.run(steps=steps)
    driver.cancel("gone")
    driver.finish()
    (window,) = driver.outputs("stays", "window", WindowText)
    assert window.tokens == search(reference, sound(3), [81, 82, 86], 3)
