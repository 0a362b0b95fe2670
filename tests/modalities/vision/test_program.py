"""Pictures in prompts: the tokens are transformers' own, and a picture that is known costs no pass."""

from __future__ import annotations

import copy
from functools import cache
from random import Random

import numpy as np
import pytest
import torch

from polymux.core.batch.encode import EncodeStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import VOCABULARY, build, tiny_idefics
from polymux.modalities.vision.idefics import split_idefics
from polymux.modalities.vision.program import LookProgram
from polymux.modalities.vision.work import LookWork, Picture

IMAGE = VOCABULARY - 1
SIZE = 32
VECTORS = 16
TOKENS = 8


@cache
def model() -> torch.nn.Module:
    return build(tiny_idefics, seed=3)


def picture(seed: int, tiles: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((tiles, 3, SIZE, SIZE)).astype(np.float32)


def ask(*parts: int | np.ndarray, seed: int = 0, tokens: int = TOKENS) -> LookWork:
    """Numbers are so many words; arrays are pictures, their tiles set apart by a word."""
    random = Random(seed)
    prompt: list[int] = []
    pictures = []
    for part in parts:
        if isinstance(part, int):
            prompt += [random.randrange(3, IMAGE) for _ in range(part)]
            continue
        starts = []
        for _ in part:
            prompt.append(3)
            starts.append(len(prompt))
            prompt += [IMAGE] * VECTORS
        pictures.append(Picture(part, starts))
    return LookWork(prompt=prompt, pictures=pictures, max_tokens=tokens, seeds=[0], sampling=Sampling(temperature=0.0))


def truth(work: LookWork) -> list[int]:
    ids = torch.tensor([work.prompt])
    tiles = [torch.from_numpy(each.tiles) for each in work.pictures]
    pixels = {"pixel_values": torch.cat(tiles)[None]} if tiles else {}
    result = model().generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=work.max_tokens,
        do_sample=False,
        eos_token_id=None,
        **pixels,
    )
    return result[0, len(work.prompt) :].tolist()


def open_driver(device: Device, **settings: int) -> Driver:
    encoder, decoder = split_idefics(copy.deepcopy(model()))
    site = Site(device, SiteSettings(**{"cache_bytes": 1 << 22, "superpage": 1 << 14, "block": 8, **settings}))
    encode = EncodeStage("encode", encoder, site, max_units=3)
    return Driver(Loop(site, {"m": LookProgram(encode, encoder, TokenStage("decode", decoder, site), "m")}))


def run(driver: Driver, works: dict[str, LookWork]) -> None:
    for job, work in works.items():
        driver.submit(job, "m", "chat", work)
    driver.finish()


both = pytest.mark.parametrize("device", [Device, LaggedCpu])

ONE = ask(3, picture(1), 5)
WORKS = {
    "one": ONE,
    "tiled": ask(2, picture(2, tiles=5), 4),
    "several": ask(picture(3), 6, picture(1), 2, picture(4, tiles=2), 3),
    "text": ask(21, seed=5),
    "other words": ask(9, picture(1), 7, seed=6),
}


@both
@pytest.mark.parametrize("units", [7, 512])
def test_tokens_are_those_of_generate(device, units):
    """One picture and many, beside a prompt without any; small chunks cut through pictures."""
    driver = open_driver(device(), max_units=units)
    run(driver, WORKS)
    assert {job: driver.tokens(job) for job in WORKS} == {job: truth(work) for job, work in WORKS.items()}


@both
def test_a_small_cache_preempts_and_changes_nothing(device):
    driver = open_driver(device(), cache_bytes=5 << 14, max_units=24)
    run(driver, {f"{name} {copy}": work for copy in range(3) for name, work in WORKS.items()})
    for copy_ in range(3):
        assert {job: driver.tokens(f"{job} {copy_}") for job in WORKS} == {j: truth(w) for j, w in WORKS.items()}


@both
def test_a_known_picture_costs_no_pass(device):
    """Asked again with other words, in another place: the encoder does not run."""
    driver = open_driver(device())
    run(driver, {"first": ONE})
    assert driver.receipt("first").encoder_hits == 0
    encode = next(stage for stage in driver.loop.programs["m"].stages if isinstance(stage, EncodeStage))
    encode.model.forward = None  # a pass would fail the job
    again = WORKS["other words"]
    run(driver, {"again": again})
    assert driver.receipt("again").encoder_hits == 1
    assert driver.tokens("again") == truth(again)


@both
def test_jobs_at_once_encode_a_picture_once(device):
    driver = open_driver(device())
    encode = next(stage for stage in driver.loop.programs["m"].stages if isinstance(stage, EncodeStage))
    forward, seen = encode.model.forward, []
    encode.model.forward = lambda items, slabs: (seen.extend(items), forward(items, slabs))[1]
    run(driver, {str(job): ask(job + 1, picture(1), 4, seed=job) for job in range(4)})
    assert len(seen) == 1
    assert sum(driver.receipt(str(job)).encoder_hits for job in range(4)) == 3


@both
def test_a_prefix_is_found_inside_a_picture_and_only_of_the_same_picture(device):
    """The ids of two pictures are equal; what differs is in the digests."""
    driver = open_driver(device())
    run(driver, {"first": ask(3, picture(1), 5)})
    cut = ask(3, picture(1), 1)
    run(driver, {"cut": cut})
    assert driver.receipt("cut").cached_units == 16  # 4 words and 12 of the 16 vectors
    other = ask(3, picture(9), 5)
    run(driver, {"other": other})
    assert driver.receipt("other").cached_units == 0
    assert driver.tokens("cut") == truth(cut)
    assert driver.tokens("other") == truth(other)


def test_tiles_of_another_size_are_refused():
    driver = open_driver(Device())
    run(driver, {"wrong": ask(2, np.zeros((1, 3, 8, 8), np.float32), 2)})
    assert driver.error("wrong").status == 400


def test_memory_stays_flat_over_many_pictures():
    """What was encoded is kept while there is room, and makes room for the next."""
    driver = open_driver(Device(), cache_bytes=6 << 14)
    for seed in range(40):
        run(driver, {str(seed): ask(2, picture(100 + seed), 2, tokens=1)})
        assert driver.receipt(str(seed)).output_units == 1


@both
def test_jobs_that_leave_hold_nothing(device):
    for steps in range(1, 8):
        driver = open_driver(device(), max_units=9)
        for job, work in WORKS.items():
            driver.submit(job, "m", "chat", work)
        driver.run(steps)
        for job in list(WORKS)[:3]:
            driver.cancel(job)
        driver.finish()
        assert driver.tokens("other words") == truth(WORKS["other words"])
