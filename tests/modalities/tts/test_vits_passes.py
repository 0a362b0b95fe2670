"""What VITS computes on a card: which texts share a pass, how many frames nobody needed, in what numbers."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch

from polymux.core.compute.device import LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.speech import telling
from polymux.core.testing.drive import Driver
from polymux.modalities.tts import vits
from polymux.modalities.tts.convolutions import bake, widen
from polymux.modalities.tts.vits_program import CARD_WINDOWS, HOST_WINDOWS, VitsProgram, Windowing, build_vits
from polymux.modalities.tts.vits_vocoder import quantize
from polymux.modalities.tts.work import Piece, SpeakWork

TEXTS = 24


@pytest.mark.parametrize("windows", [HOST_WINDOWS.count(62.5), CARD_WINDOWS.count(62.5, 26)], ids=["host", "card"])
def test_windows_are_the_whole_and_few_sizes(windows: Windowing) -> None:
    for frames in range(1, 2000):
        split = list(windows.split(frames))
        starts = [start for start, _ in split]
        assert starts == [0, *np.cumsum([size for _, size in split])[:-1]]
        last, size = split[-1]
        assert last < frames <= last + size
        assert split[0][1] == windows.sizes[0] and {size for _, size in split} <= set(windows.sizes)
        if frames > windows.sizes[0] + windows.context:
            assert all(size + windows.context <= frames for _, size in split), "its context is there"


class Watched:
    """A program as on a card, and the passes that it ran: rows, or rows and frames of the vocoder's."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        always = property(lambda part: True, lambda part, value: None)
        monkeypatch.setattr(vits.VitsPart, "rounds", always, raising=False)
        site = Site(LaggedCpu(), SiteSettings(cache_bytes=1 << 26))
        self.program: VitsProgram = build_vits(copy.deepcopy(model), site)
        self.driver = Driver(Loop(site, {"voice": self.program}))
        self.rows: dict[str, list[int]] = {"read": [], "flow": []}
        self.windows: list[tuple[int, int]] = []
        for name, part in (("read", self.program.reader.model), ("flow", self.program.flow.model)):
            self._watch(name, part, monkeypatch)
        decoder: Any = self.program.vocoder.model
        decoder.decoder.register_forward_pre_hook(
            lambda module, inputs: self.windows.append((inputs[0].shape[0], inputs[0].shape[3]))
        )

    def _watch(self, name: str, part: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        forward = part.forward

        def watch(items: list[Any], slabs: list[torch.Tensor]) -> list[Any]:
            self.rows[name].append(len(items))
            return forward(items, slabs)

        monkeypatch.setattr(part, "forward", watch)

    def say(self, job: str, count: int) -> None:
        ids = np.random.default_rng(count).integers(1, 30, count).tolist()
        self.driver.submit(job, "voice", "speak", SpeakWork(None, count))
        for piece in (Piece(ids, pace=0.25), Piece(last=True)):
            self.driver.post(job, piece)


def test_texts_of_any_length_begin_together(originals: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Read in one pass, through the flow in one, all heard after one pass of the vocoder. Fewer frames are computed
    than in one batch in which all are as long as the longest."""
    watched = Watched(originals["vits"], monkeypatch)
    counts = np.random.default_rng(0).integers(80, 300, TEXTS).tolist()
    for job, count in enumerate(counts):
        watched.say(str(job), count)
    while not watched.driver.reports["0"]:
        watched.driver.step()
    assert all(watched.driver.reports[str(job)] for job in range(TEXTS))
    watched.driver.finish()
    assert watched.rows == {"read": [TEXTS], "flow": [TEXTS]}
    assert watched.windows[0][0] == TEXTS and len(watched.windows) <= TEXTS
    spoken = [watched.driver.receipt(str(job)).output_units for job in range(TEXTS)]  # type: ignore[union-attr]
    computed = sum(rows * frames for rows, frames in watched.windows)
    assert sum(spoken) < computed < 1.35 * sum(spoken) < TEXTS * max(spoken)


def test_who_comes_later_is_heard_before_others_go_on(
    originals: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(originals["vits"], monkeypatch)
    watched.program.vocoder.max_units = 1  # one window a pass, and many of them
    watched.program.windows = Windowing((10,), (10,))
    for number in range(8):
        watched.say(str(number), 300 + number)
    while not all(watched.driver.reports[str(number)] for number in range(8)):
        watched.driver.step()
    watched.say("late", 60)
    flown = len(watched.rows["flow"])
    while len(watched.rows["flow"]) == flown:
        watched.driver.step()
    begun = len(watched.windows)
    while not watched.driver.reports["late"]:
        watched.driver.step()
    assert len(watched.windows) - begun <= 4, "not the sixteen that waited already"
    watched.driver.finish()


def test_samples_are_rounded_as_on_the_host() -> None:
    samples = torch.tensor([0.0, 0.5 / 32767, 1.5 / 32767, -0.1234, 1.0, -1.0, 3.0, float("nan"), float("-inf")])
    assert quantize(samples).tolist() == telling.quantize(samples.numpy()).tolist()


def test_a_model_that_is_made_faster_leaves_its_like_alone(originals: dict[str, Any]) -> None:
    model = copy.deepcopy(originals["vits"])
    latents, mask = torch.randn(1, 16, 30), torch.ones(1, 1, 30)
    with torch.no_grad():
        for module in (model, originals["vits"]):
            flown = bake(model.flow)(latents, mask, None, reverse=True)
            torch.testing.assert_close(flown, module.flow(latents, mask, None, reverse=True), atol=1e-5, rtol=0)
            wide = widen(model.decoder)(latents[:, :, None], None)[:, :, 0]
            torch.testing.assert_close(wide, module.decoder(latents), atol=1e-5, rtol=0)
