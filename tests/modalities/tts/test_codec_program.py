"""Codec voices end to end: transformers' frames, the whole codec's sound, windows, tails, pace, seeds and cancels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.errors import PolymuxError
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.testing.drive import Driver
from polymux.core.testing.voices import CODES
from polymux.modalities.tts import codec_program
from polymux.modalities.tts.work import Piece

OFFSET = CODES + 3
"""Where the tiny CSM has its text."""

TEXTS = ([5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15, 16, 17])


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Thirty or forty frames of a piece at most: random models seldom come to an end."""
    monkeypatch.setattr(codec_program, "LONGEST", 2.4 if "csm" in request.node.name else 0.4)


def whole(originals: dict[str, Any], text: list[int]) -> np.ndarray:
    """What transformers makes of a text: greedy frames, and all of them decoded at once."""
    model = originals["csm"]
    prompt = torch.tensor([text])
    frames = model.generate(input_ids=prompt, max_new_tokens=30, do_sample=False, depth_decoder_do_sample=False)
    codes = frames[0].T[None].clamp(max=CODES - 1)
    return model.codec_model.decode(codes).audio_values[0, 0].detach().numpy()


def piece(text: list[int], **more: Any) -> Piece:
    return Piece([id + OFFSET for id in text], **more)


@pytest.mark.parametrize("tier", ["reference", "fast"])
@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_csm_says_what_transformers_says(
    drive: Callable[..., Driver], say: Any, sound: Any, originals: dict[str, Any], device: type[Device], tier: str
) -> None:
    """Several at once, in a cache too small for them: streamed sound is the whole codec's, to 1e-4."""
    driver = drive("csm", device, pages=6, tier=tier)
    for job, text in enumerate(TEXTS):
        say(driver, str(job), piece(text))
    driver.finish()
    for job, text in enumerate(TEXTS):
        expected = whole(originals, text).clip(-1, 1)
        np.testing.assert_allclose(sound(driver, str(job)), expected, atol=1e-4)
    assert len(driver.outputs("0", SPOKEN, Spoken)[0].samples) == codec_program.FIRST_FRAMES * 8


def test_any_first_window_gives_the_same(
    drive: Callable[..., Driver], say: Any, sound: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for first in (1, 3, 30):
        monkeypatch.setattr(codec_program, "FIRST_FRAMES", first)
        driver = drive("flat", temperature=0.0)
        say(driver, "a", Piece([30, 31, 32]))
        driver.finish()
        found.append(sound(driver, "a"))
    for other in found[1:]:
        np.testing.assert_allclose(other, found[0], atol=1e-4)


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_a_plain_language_model_writes_whole_frames(
    drive: Callable[..., Driver], say: Any, sound: Any, originals: dict[str, Any], device: type[Device]
) -> None:
    """Sound equals DAC's over all of its frames, tail included, and there is some for the shortest text."""
    driver = drive("flat", device)
    for job, prompt in enumerate(([30], [31, 32, 33, 34])):
        say(driver, str(job), Piece(prompt), seed=7)
    driver.finish()
    for job in ("0", "1"):
        receipt = driver.receipt(job)
        assert receipt is not None
        samples = sound(driver, job)
        assert len(samples) == 8 * receipt.output_units > 0
        assert receipt.sound_seconds == pytest.approx(len(samples) / 800)
        assert np.abs(samples).max() > 0


def test_the_same_alone_and_among_others(drive: Callable[..., Driver], say: Any, sound: Any) -> None:
    """Drawn frames depend on the seed alone; another seed sounds otherwise."""
    alone = drive("csm", temperature=6.0, top_k=5)
    say(alone, "a", piece(TEXTS[0]), seed=11)
    alone.finish()
    crowd = drive("csm", LaggedCpu, pages=6, temperature=6.0, top_k=5)
    for job, text, seed in (("b", TEXTS[1], 1), ("a", TEXTS[0], 11), ("c", TEXTS[0], 12)):
        say(crowd, job, piece(text), seed=seed)
    crowd.finish()
    np.testing.assert_allclose(sound(crowd, "a"), sound(alone, "a"), atol=1e-4)
    assert not np.array_equal(sound(crowd, "c"), sound(crowd, "a"))


@pytest.mark.parametrize("pace", [0.25, 0.5, 2.0, 4.0])
def test_pace_and_pauses_are_exact(drive: Callable[..., Driver], say: Any, sound: Any, pace: float) -> None:
    driver = drive("flat", temperature=0.0)
    say(driver, "plain", Piece([30, 31]))
    say(driver, "paced", Piece([30, 31], pace=pace, pause=0.5), Piece(pause=0.25))
    driver.finish()
    samples = sound(driver, "paced")
    assert len(samples) == round(len(sound(driver, "plain")) / pace) + 600
    assert not samples[-600:].any()


def test_a_cancel_frees_everything_at_once(drive: Callable[..., Driver], say: Any) -> None:
    driver = drive("csm")
    say(driver, "a", *[piece(TEXTS[0])] * 5)
    say(driver, "b", piece(TEXTS[1]))
    while not driver.reports["a"]:
        assert driver.step()
    driver.cancel("a")
    driver.finish()
    assert driver.receipt("b") is not None
    assert len(driver.outputs("a", SPOKEN, Spoken)) == 1


def test_a_prompt_that_leaves_no_room_is_refused(drive: Callable[..., Driver], say: Any) -> None:
    driver = drive("csm")
    say(driver, "a", Piece([OFFSET + 5] * 256))
    driver.finish()
    error = driver.error("a")
    assert isinstance(error, PolymuxError)
    assert (error.status, error.param) == (400, "input")
