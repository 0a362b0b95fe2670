"""Tiny voices with random weights, and loops that speak with them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.pipeline import Program
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.testing.voices import CODES, tiny_csm, tiny_dac, tiny_vits
from polymux.modalities.tts.codec_load import build as build_codec
from polymux.modalities.tts.codec_load import build_csm
from polymux.modalities.tts.codecs import make_codec
from polymux.modalities.tts.frames import FlatFrames, FlatSpan
from polymux.modalities.tts.vits_program import build_vits
from polymux.modalities.tts.work import Piece, SpeakWork

GREEDY = {"temperature": 0.0, "top_k": 0}
SPAN = FlatSpan(first=20, codebooks=3, size=CODES, end=10)


@cache
def csm() -> Any:
    return build(tiny_csm, seed=3)


@cache
def vits(speakers: int = 1) -> Any:
    torch.manual_seed(1)
    return tiny_vits(speakers).eval()


@cache
def dac() -> Any:
    torch.manual_seed(5)
    return tiny_dac().eval()


def load_csm(site: Site, **options: Any) -> Program:
    return build_csm(copy.deepcopy(csm()), site, "csm", {**GREEDY, **options})


def load_vits(site: Site, speakers: int = 1) -> Program:
    return build_vits(copy.deepcopy(vits(speakers)), site)


def load_flat(site: Site, temperature: float = 1.0) -> Program:
    decoder = TokenStage("codes", TransformersDecoder(copy.deepcopy(build(tiny_llama))), site)
    codec = make_codec(copy.deepcopy(dac()))
    return build_codec(decoder, codec, FlatFrames(SPAN), site, "flat", Sampling(temperature=temperature))


LOADS: dict[str, Callable[..., Program]] = {"csm": load_csm, "vits": load_vits, "flat": load_flat}


@pytest.fixture
def drive() -> Callable[..., Driver]:
    """`drive("csm", LaggedCpu, pages=4)`: a loop that serves a tiny voice as `voice`, in a cache of so many pages."""

    def open_loop(kind: str, device: type[Device] = Device, *, pages: int = 64, **options: Any) -> Driver:
        settings = SiteSettings(max_rows=4, max_units=16, block=4, cache_bytes=pages << 13, superpage=1 << 13)
        site = Site(device(), settings)
        return Driver(Loop(site, {"voice": LOADS[kind](site, **options)}))

    return open_loop


@pytest.fixture
def originals() -> dict[str, Any]:
    """transformers' own models, which the tests leave as they are."""
    return {"csm": csm(), "vits": vits(), "vits of three": vits(3), "flat": build(tiny_llama), "dac": dac()}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Any:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def say() -> Callable[..., None]:
    """`say(driver, "job", Piece(...), ..., seed=3)`: to the model called voice."""

    def submit(driver: Driver, job: str, *pieces: Piece, seed: int = 0, speaker: int | None = None) -> None:
        driver.submit(job, "voice", "speak", SpeakWork(speaker, seed))
        for piece in (*pieces, Piece(last=True)):
            driver.post(job, piece)

    return submit


@pytest.fixture
def sound() -> Callable[[Driver, str], np.ndarray]:
    """All samples of a job, from -1 to 1."""

    def join(driver: Driver, job: str) -> np.ndarray:
        assert driver.error(job) is None, driver.error(job)
        parts = [spoken.samples for spoken in driver.outputs(job, SPOKEN, Spoken)]
        return np.concatenate(parts) / 32767 if parts else np.zeros(0)

    return join
