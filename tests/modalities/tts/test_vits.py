"""VITS on the runtime: transformers' samples for every seed, speaker and pace, in windows of any length."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from transformers import VitsConfig

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.testing.drive import Driver
from polymux.core.testing.media import compare_spectra
from polymux.core.testing.voices import tiny_vits
from polymux.modalities.tts import vits
from polymux.modalities.tts.field import find_halo
from polymux.modalities.tts.vits import Utterance, VitsReader
from polymux.modalities.tts.vits_program import FASTEST, build_vits
from polymux.modalities.tts.vits_vocoder import LatentWindow, VitsVocoder, read_vocoder
from polymux.modalities.tts.work import Piece, SpeakWork, WordSpan

IDS = [list(np.random.default_rng(length).integers(1, 30, length)) for length in (9, 14, 20, 3)]


def piece(number: int, **more: Any) -> Piece:
    return Piece([int(id) for id in IDS[number]], **more)


@torch.no_grad()
def whole(model: Any, ids: list[int], seed: int = 0, pace: float = 1.0, speaker: int | None = None) -> np.ndarray:
    torch.manual_seed(seed)
    out = model(torch.tensor([ids]), speaker_id=speaker, speaking_rate=pace)
    return out.waveform[0].numpy()


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_streamed_is_what_transformers_says(
    drive: Callable[..., Driver], say: Any, sound: Any, originals: dict[str, Any], device: type[Device]
) -> None:
    driver = drive("vits", device)
    for number in range(len(IDS)):
        say(driver, str(number), piece(number, pace=1.0 + number / 3), seed=number + 5)
    driver.finish()
    for number, ids in enumerate(IDS):
        expected = whole(originals["vits"], ids, number + 5, 1.0 + number / 3)
        np.testing.assert_allclose(sound(driver, str(number)), expected, atol=1e-4)
    assert len(driver.outputs("2", SPOKEN, Spoken)) > 1


def test_speakers_share_passes(
    drive: Callable[..., Driver], say: Any, sound: Any, originals: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    together: list[set[int | None]] = []
    forward = VitsReader.forward

    def watch(self: VitsReader, items: list[Utterance], slabs: list[torch.Tensor]) -> list[torch.Tensor]:
        together.append({item.speaker for item in items})
        return forward(self, items, slabs)

    monkeypatch.setattr(VitsReader, "forward", watch)
    driver = drive("vits", speakers=3)
    for speaker in range(3):
        say(driver, str(speaker), piece(1), speaker=speaker)
    driver.finish()
    for speaker in range(3):
        expected = whole(originals["vits of three"], IDS[1], speaker=speaker)
        np.testing.assert_allclose(sound(driver, str(speaker)), expected, atol=1e-4)
    assert {0, 1, 2} in together


@pytest.mark.parametrize("count", [1, 5, 11, 1000])
def test_windows_of_any_length_are_the_whole(originals: dict[str, Any], count: int) -> None:
    vocoder = VitsVocoder(originals["vits"])
    latents = torch.randn(60, 16)
    with torch.no_grad():
        expected = originals["vits"].decoder(latents.T[None])[0, 0]
        windows = [LatentWindow(latents, start, min(start + count, 60), None) for start in range(0, 60, count)]
        found = torch.cat([vocoder.forward([window], [])[0] for window in windows])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


def test_the_last_windows_of_all_sounds_share_a_pass(originals: dict[str, Any]) -> None:
    """However short: what they lack in length they get in context."""
    vocoder = VitsVocoder(originals["vits"])
    latents = torch.randn(90, 16)
    ends = [71, 74, 78]
    windows = [LatentWindow(latents[:end], 70, end, None, usual=8) for end in ends]
    inner = LatentWindow(latents, 60, 68, None, usual=8)
    assert all(vocoder.compatible(inner, window) for window in windows)
    with torch.no_grad():
        found = vocoder.forward([inner, *windows], [])
        for end, sound in zip(ends, found[1:], strict=True):
            expected = originals["vits"].decoder(latents[:end].T[None])[0, 0, 70 * 8 :]
            torch.testing.assert_close(sound, expected, atol=1e-5, rtol=0)


def test_nothing_clicks_where_windows_meet(originals: dict[str, Any]) -> None:
    """The spectrum at every joint is that of the whole sound; with half the halo it is not."""
    vocoder = VitsVocoder(originals["vits"])
    latents = 10 * torch.randn(60, 16, generator=torch.Generator().manual_seed(0))
    expected = originals["vits"].decoder(latents.T[None])[0, 0].detach().numpy()

    def join() -> np.ndarray:
        windows = [LatentWindow(latents, start, start + 5, None) for start in range(0, 60, 5)]
        with torch.no_grad():
            return torch.cat([vocoder.forward([window], [])[0] for window in windows]).numpy()

    assert compare_spectra(join(), expected, range(40, 480, 40)) < -80
    vocoder.halo //= 2
    assert compare_spectra(join(), expected, range(40, 480, 40)) > -60


def test_a_halo_that_is_too_narrow_would_be_noticed(originals: dict[str, Any]) -> None:
    vocoder = VitsVocoder(originals["vits"])
    latents = 10 * torch.randn(60, 16)
    vocoder.halo //= 2
    with torch.no_grad():
        expected = originals["vits"].decoder(latents.T[None])[0, 0]
        found = vocoder.forward([LatentWindow(latents, 20, 40, None)], [])[0]
    assert (found - expected[160:320]).abs().max() > 1e-4


def test_the_halo_of_the_published_models() -> None:
    """Twelve frames were measured to suffice for the default vocoder; thirteen are what its kernels reach."""
    assert find_halo(read_vocoder(VitsConfig()), 256) == (13, 13)


def test_words_have_times(drive: Callable[..., Driver], say: Any, sound: Any) -> None:
    driver = drive("vits")
    words = [WordSpan("one ", 0, 5), WordSpan("two", 5, 9)]
    say(driver, "a", Piece(pause=0.5), piece(0, words=words), piece(0, words=words), seed=3)
    driver.finish()
    told = [word for spoken in driver.outputs("a", SPOKEN, Spoken) for word in spoken.words]
    assert "".join(word.text for word in told) == "one twoone two"
    assert told[0].start == 0.5
    assert all(one.end <= two.start + 1e-9 for one, two in itertools.pairwise(told))
    assert told[-1].end == pytest.approx(len(sound(driver, "a")) / 1000)


@pytest.mark.parametrize("pace", [2.5, 4.0])
def test_faster_than_the_model_speaks_by_itself(
    drive: Callable[..., Driver], say: Any, sound: Any, pace: float
) -> None:
    """Exact to the sample, of the sound at the model's fastest; words are where they are heard."""
    driver = drive("vits")
    words = [WordSpan("one ", 0, 5), WordSpan("two", 5, 9)]
    say(driver, "own", piece(0, words=words, pace=FASTEST), seed=3)
    say(driver, "faster", piece(0, words=words, pace=pace), seed=3)
    driver.finish()
    faster = sound(driver, "faster")
    assert len(faster) == round(len(sound(driver, "own")) * FASTEST / pace)
    told = [word for spoken in driver.outputs("faster", SPOKEN, Spoken) for word in spoken.words]
    assert told[0].start == 0
    assert told[-1].end == pytest.approx(len(faster) / 1000, abs=1e-3)


def test_the_same_alone_and_among_others(drive: Callable[..., Driver], say: Any, sound: Any) -> None:
    alone, crowd = drive("vits"), drive("vits", LaggedCpu)
    say(alone, "a", piece(1), piece(2), seed=1)
    for job, number in (("b", 0), ("a", 1), ("c", 2)):
        say(crowd, job, piece(number), piece(2), seed=1)
    alone.finish()
    crowd.finish()
    np.testing.assert_allclose(sound(crowd, "a"), sound(alone, "a"), atol=1e-4)


def test_a_cancel_between_two_windows(drive: Callable[..., Driver], say: Any) -> None:
    driver = drive("vits")
    say(driver, "a", *[piece(2)] * 6)
    while not driver.reports["a"]:
        assert driver.step()
    driver.cancel("a")
    driver.finish()
    assert len(driver.outputs("a", SPOKEN, Spoken)) == 1


@pytest.fixture
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes are filled up, as on a card."""
    always = property(lambda part: True, lambda part, value: None)
    monkeypatch.setattr(vits.VitsPart, "rounds", always, raising=False)


@pytest.mark.parametrize("speakers", [1, 3])
@pytest.mark.usefixtures("rounded")
def test_what_fills_a_pass_is_heard_by_nobody(
    drive: Callable[..., Driver], say: Any, sound: Any, originals: dict[str, Any], speakers: int
) -> None:
    speaker, model = (1, "vits of three") if speakers > 1 else (None, "vits")
    driver = drive("vits", speakers=speakers)
    for number in range(len(IDS)):
        say(driver, str(number), piece(number, pace=0.7), seed=number, speaker=speaker)
    driver.finish()
    for number, ids in enumerate(IDS):
        expected = whole(originals[model], ids, number, 0.7, speaker)
        np.testing.assert_allclose(sound(driver, str(number)), expected, atol=1e-4)


@pytest.mark.usefixtures("rounded")
def test_windows_on_a_card_have_shapes_that_were_rehearsed() -> None:
    """A shape that comes first while somebody waits costs a plan for each of the vocoder's convolutions. Texts of any
    length come at any time; only what is shorter than a window has a shape of its own."""
    torch.manual_seed(0)
    site = Site(LaggedCpu(), SiteSettings(cache_bytes=1 << 26))
    program = build_vits(tiny_vits().eval(), site)
    seen: set[torch.Size] = set()
    program.vocoder.model.decoder.register_forward_pre_hook(  # type: ignore[attr-defined]
        lambda module, inputs: seen.add(inputs[0].shape)
    )
    with torch.inference_mode():
        program.vocoder.model.rehearse(program.vocoder.max_units)  # type: ignore[attr-defined]
    rehearsed = set(seen)
    seen.clear()
    driver = Driver(Loop(site, {"m": program}))
    draw = np.random.default_rng(0)
    for number in range(11):
        driver.submit(str(number), "m", "speak", SpeakWork(None, number))
        ids = draw.integers(1, 30, int(draw.integers(60, 140))).tolist()
        driver.post(str(number), Piece(ids, pace=0.2))
        driver.post(str(number), Piece(last=True))
        driver.run(steps=int(draw.integers(0, 6)))
    driver.finish()
    assert len(seen) > 5
    assert seen <= rehearsed, sorted(seen - rehearsed)
