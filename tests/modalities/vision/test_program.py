"""Pictures in prompts: the tokens are transformers' own, and a picture that is known costs no pass."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from polymux.core.batch.encode import EncodeStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.content import content_digest
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import (
    IMAGE,
    build,
    tiny_idefics,
    tiny_llava,
    tiny_onevision,
    tiny_qwen3vl,
    tiny_qwen25vl,
    tiny_smolvlm,
)
from polymux.modalities.vision.positions import Grid, place_tokens
from polymux.modalities.vision.program import LookProgram
from polymux.modalities.vision.split import split_model
from polymux.modalities.vision.work import Item, LookWork, Picture

TOKENS = 8
SECONDS = 0.5
"""Between the steps of a clip."""
ANYRES_SIZE = (40, 28)
"""Of a picture that takes three by two tiles, and one for the whole."""
ANYRES = 79
"""Its vectors: those of the whole, those of the tiles that are no padding, and one behind every row."""
SCALE = {"rescale_factor": 1 / 255, "image_mean": [0.5, 0.4, 0.6], "image_std": [0.2, 0.3, 0.25]}


def paint(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (*shape, 3), np.uint8)


def normalise(pixels: np.ndarray) -> torch.Tensor:
    """(N, H, W, 3) to (N, 3, H, W)."""
    scaled = (pixels / 255 - np.array(SCALE["image_mean"])) / np.array(SCALE["image_std"])
    return torch.from_numpy(scaled.astype(np.float32)).permute(0, 3, 1, 2)


@dataclass
class Prompt:
    """A prompt under construction, and what transformers is told of its pictures."""

    ids: list[int] = field(default_factory=list)
    pictures: list[Picture] = field(default_factory=list)
    grids: list[Grid] = field(default_factory=list)
    told: list[np.ndarray] = field(default_factory=list)

    def hold(self, pixels: np.ndarray, *counts: int, id: int = IMAGE, size: tuple[int, int] = (0, 0)) -> Item:
        """Stretches of places, a word before each."""
        starts = []
        for count in counts:
            self.ids.append(3)
            starts.append(len(self.ids))
            self.ids += [id] * count
        return Item(pixels, content_digest(pixels, str(size)), starts, list(counts), size)


def add_tiles(prompt: Prompt, tiles: np.ndarray) -> None:
    prompt.pictures.append(Picture([prompt.hold(tile[None], 16) for tile in tiles]))
    prompt.told.append(tiles)


def add_anyres(prompt: Prompt, tiles: np.ndarray) -> None:
    """A picture whose tiles are put together again."""
    item = prompt.hold(tiles, ANYRES, size=ANYRES_SIZE)
    prompt.pictures.append(Picture([item]))
    prompt.told.append(tiles)


def add_grid(prompt: Prompt, frames: np.ndarray, *, apart: bool) -> None:
    """A picture, or a clip whose steps stand apart (with times between) or in one."""
    steps, height, width = max(1, len(frames) // 2), frames.shape[1] // 8, frames.shape[2] // 8
    clip = len(frames) > 1
    counts = [height * width] * steps if apart else [steps * height * width]
    item = prompt.hold(frames, *counts, id=IMAGE - clip)
    for start in item.starts:
        interval = 4 * SECONDS if clip and not apart else 1.0
        prompt.grids.append(Grid(start, 1 if apart else steps, height, width, interval))
    prompt.pictures.append(Picture([item]))
    prompt.told.append(frames)


@cache
def model_of(make: Callable[[], torch.nn.Module]) -> torch.nn.Module:
    return build(make, seed=3)


def tell_tiles(prompt: Prompt) -> dict[str, Any]:
    return {"pixel_values": normalise(np.concatenate(prompt.told))[None]}


def tell_pictures(prompt: Prompt) -> dict[str, Any]:
    return {"pixel_values": normalise(np.concatenate(prompt.told))}


def tell_anyres(prompt: Prompt) -> dict[str, Any]:
    sizes = torch.tensor([ANYRES_SIZE] * len(prompt.told))
    return {"pixel_values": torch.stack([normalise(tiles) for tiles in prompt.told]), "image_sizes": sizes}


def tell_grids(prompt: Prompt) -> dict[str, Any]:
    """Patches as transformers' own processor cuts them; frames of a clip are cut by twos like pictures of one."""
    cutter = Qwen2VLImageProcessorPil(patch_size=4, merge_size=2, temporal_patch_size=2)
    told = defaultdict[str, list[Any]](list)
    for frames in prompt.told:
        clip = len(frames) > 1
        scaled = normalise(frames).numpy()
        cut = [torch.from_numpy(cutter.patchify(frame, 4, 2, 1)[0]) for frame in scaled]
        pairs = list(zip(cut[::2], cut[1::2])) if clip else [(cut[0], cut[0])]
        patches = [torch.stack([one.view(-1, 3, 16), two.view(-1, 3, 16)], dim=2).flatten(1) for one, two in pairs]
        told["pixel_values_videos" if clip else "pixel_values"] += patches
        grid = [len(pairs), frames.shape[1] // 4, frames.shape[2] // 4]
        told["video_grid_thw" if clip else "image_grid_thw"].append(grid)
    ids = torch.tensor([prompt.ids])
    result: dict[str, Any] = {"mm_token_type_ids": (ids == IMAGE).int() + 2 * (ids == IMAGE - 1).int()}
    for name, values in told.items():
        result[name] = torch.cat(values) if name.startswith("pixel") else torch.tensor(values)
    return result


@dataclass(frozen=True)
class Family:
    make: Callable[[], torch.nn.Module]
    add: Callable[[Prompt, np.ndarray], None]
    tell: Callable[[Prompt], dict[str, Any]]
    shapes: tuple[tuple[int, ...], ...]
    """Of pictures: the first is the plain one."""
    options: dict[str, Any] = field(default_factory=dict)

    def picture(self, seed: int, shape: int = 0) -> np.ndarray:
        return paint(seed, *self.shapes[shape % len(self.shapes)])

    def model(self) -> Any:
        return model_of(self.make)

    def ask(self, *parts: int | np.ndarray, seed: int = 0, tokens: int = TOKENS, n: int = 1) -> LookWork:
        return self.work(self.write(*parts, seed=seed), tokens, n)

    def write(self, *parts: int | np.ndarray, seed: int = 0) -> Prompt:
        """Numbers are so many words, arrays are pictures."""
        random, prompt = Random(seed), Prompt()
        for part in parts:
            if isinstance(part, int):
                prompt.ids += [random.randrange(4, IMAGE - 1) for _ in range(part)]
            else:
                self.add(prompt, part)
        return prompt

    def work(self, prompt: Prompt, tokens: int = TOKENS, n: int = 1) -> LookWork:
        stands = place_tokens(len(prompt.ids), prompt.grids) if prompt.grids else None
        return LookWork(
            prompts=[prompt.ids],
            pictures=prompt.pictures,
            positions=stands,
            max_tokens=[tokens],
            n=n,
            seeds=[0] * n,
            sampling=Sampling(temperature=0.0),
        )

    def truth(self, prompt: Prompt, tokens: int = TOKENS) -> list[int]:
        ids = torch.tensor([prompt.ids])
        result = self.model().generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            **(self.tell(prompt) if prompt.told else {}),
            **(self.options if prompt.told else {}),
        )
        return result[0, len(prompt.ids) :].tolist()


FAMILIES = {
    "idefics3": Family(tiny_idefics, add_tiles, tell_tiles, ((1, 32, 32), (5, 32, 32), (2, 32, 32))),
    "smolvlm": Family(tiny_smolvlm, add_tiles, tell_tiles, ((1, 32, 32), (5, 32, 32), (2, 32, 32))),
    "llava": Family(tiny_llava, lambda p, t: add_whole(p, t), tell_pictures, ((1, 16, 16),)),
    "onevision": Family(tiny_onevision, add_anyres, tell_anyres, ((7, 16, 16),)),
    "qwen2.5-vl": Family(
        tiny_qwen25vl,
        lambda prompt, frames: add_grid(prompt, frames, apart=False),
        tell_grids,
        ((1, 40, 24), (1, 16, 16), (4, 24, 32), (1, 8, 56)),
        {"second_per_grid_ts": [SECONDS] * 9},
    ),
    "qwen3-vl": Family(
        tiny_qwen3vl,
        lambda prompt, frames: add_grid(prompt, frames, apart=True),
        tell_grids,
        ((1, 40, 24), (1, 16, 16), (4, 24, 32), (1, 8, 56)),
    ),
}


def add_whole(prompt: Prompt, picture: np.ndarray) -> None:
    prompt.pictures.append(Picture([prompt.hold(picture, 16)]))
    prompt.told.append(picture)


def open_driver(family: Family, device: Device, *, tier: str = "fast", **settings: int) -> Driver:
    encoder, decoder = split_model(copy.deepcopy(family.model()), SCALE, device, piece=8)
    if tier == "fast":
        decoder = accelerate(decoder)
        assert isinstance(decoder, FastDecoder)
    site = Site(device, SiteSettings(**{"cache_bytes": 1 << 22, "superpage": 1 << 14, "block": 8, **settings}))
    encode = EncodeStage("encode", encoder, site, max_units=12)
    return Driver(Loop(site, {"m": LookProgram(encode, encoder, TokenStage("decode", decoder, site), "m", site)}))


def run(driver: Driver, works: dict[str, LookWork]) -> None:
    for job, work in works.items():
        driver.submit(job, "m", "chat", work)
    driver.finish()


def encode_of(driver: Driver) -> EncodeStage:
    return next(stage for stage in driver.loop.programs["m"].stages if isinstance(stage, EncodeStage))


def prompts_of(family: Family) -> dict[str, Prompt]:
    see = family.picture
    return {
        "one": family.write(3, see(1), 5),
        "other shape": family.write(2, see(2, 1), 4),
        "several": family.write(see(3), 6, see(1), 2, see(4, 2), see(5, 3), 3),
        "text": family.write(21, seed=5),
        "other words": family.write(9, see(1), 7, seed=6),
    }


both = pytest.mark.parametrize("device", [Device, LaggedCpu])
families = pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
"""What the encoder and the positions do differs by family."""
some = pytest.mark.parametrize("family", [FAMILIES["idefics3"], FAMILIES["qwen3-vl"]], ids=["idefics3", "qwen3-vl"])
"""Where the family makes no difference: one block an item, and many with positions of their own."""


@families
@pytest.mark.parametrize(
    ("device", "tier", "units"), [(Device, "fast", 7), (LaggedCpu, "fast", 512), (LaggedCpu, "reference", 11)]
)
def test_tokens_are_those_of_generate(family, device, tier, units):
    """One picture and many, beside a prompt without any; small chunks cut through pictures."""
    prompts = prompts_of(family)
    driver = open_driver(family, device(), tier=tier, max_units=units)
    run(driver, {job: family.work(prompt) for job, prompt in prompts.items()})
    assert [driver.error(job) for job in prompts] == [None] * len(prompts)
    assert {job: driver.tokens(job) for job in prompts} == {job: family.truth(each) for job, each in prompts.items()}


@some
@both
def test_a_small_cache_preempts_and_changes_nothing(family, device):
    prompts = prompts_of(family)
    expected = {job: family.truth(prompt) for job, prompt in prompts.items()}
    driver = open_driver(family, device(), cache_bytes=9 << 14, max_units=24)
    works = {job: family.work(prompt) for job, prompt in prompts.items()}
    run(driver, {f"{job} {copy}": work for copy in range(3) for job, work in works.items()})
    for number in range(3):
        assert {job: driver.tokens(f"{job} {number}") for job in prompts} == expected


@families
@both
def test_a_known_picture_costs_no_pass(family, device):
    """Asked again with other words, in another place: the encoder does not run."""
    prompts = prompts_of(family)
    driver = open_driver(family, device())
    run(driver, {"first": family.work(prompts["one"])})
    assert driver.receipt("first").encoder_hits == 0
    encode_of(driver).model.forward = None  # a pass would fail the job
    run(driver, {"again": family.work(prompts["other words"])})
    assert driver.receipt("again").encoder_hits == 1
    assert driver.tokens("again") == family.truth(prompts["other words"])


@some
@both
def test_jobs_at_once_encode_a_picture_once(family, device):
    driver = open_driver(family, device())
    model, seen = encode_of(driver).model, []
    forward = model.forward
    model.forward = lambda items: (seen.extend(items), forward(items))[1]
    works = {str(job): family.ask(job + 1, family.picture(1), 4, seed=job) for job in range(4)}
    run(driver, works)
    assert len(seen) == 1
    assert sum(driver.receipt(job).encoder_hits for job in works) == 3


@some
@both
def test_a_prefix_is_found_inside_a_picture_and_only_of_the_same_picture(family, device):
    """The ids of two pictures are equal; what differs is in the digests."""
    driver = open_driver(family, device())
    cut, other = family.write(3, family.picture(1), 1), family.write(3, family.picture(9), 5)
    run(driver, {"first": family.ask(3, family.picture(1), 5)})
    run(driver, {"cut": family.work(cut)})
    assert driver.receipt("cut").cached_units == 16  # 4 words and 12 vectors of the picture
    run(driver, {"other": family.work(other)})
    assert driver.receipt("other").cached_units == 0
    assert driver.tokens("cut") == family.truth(cut)
    assert driver.tokens("other") == family.truth(other)


def test_choices_share_the_picture_and_go_on_behind_it():
    family = FAMILIES["qwen3-vl"]
    prompt = family.write(2, family.picture(1), 5)
    driver = open_driver(family, LaggedCpu())
    run(driver, {"both": family.work(prompt, n=2)})
    assert [driver.tokens("both", branch) for branch in range(2)] == [family.truth(prompt)] * 2


@families
def test_pixels_of_another_shape_are_refused(family):
    driver = open_driver(family, Device())
    stands = np.zeros((3, 1), np.int64) if family in list(FAMILIES.values())[-2:] else None
    work = LookWork(prompts=[[3]], pictures=[odd(12, 9)], positions=stands, max_tokens=[1], seeds=[0])
    run(driver, {"wrong": work})
    assert driver.error("wrong").status == 400
    assert "shape (1, 12, 9, 3)" in driver.error("wrong").message


def test_places_that_are_not_the_encoders_are_refused():
    family = FAMILIES["qwen3-vl"]
    work = family.ask(2, family.picture(1), 5)
    work.pictures[0].items[0].counts[0] -= 1
    driver = open_driver(family, Device())
    run(driver, {"wrong": work})
    assert driver.error("wrong").status == 400


def odd(*shape: int) -> Picture:
    return Picture([Item(paint(1, 1, *shape), b"odd", [0], [1])])


@some
@pytest.mark.parametrize("pictures", [30, pytest.param(1000, marks=pytest.mark.slow)])
def test_memory_stays_flat_over_many_pictures(family, pictures):
    """What was encoded is kept while there is room, and makes room for the next."""
    driver = open_driver(family, Device(), cache_bytes=9 << 14)
    for seed in range(pictures):
        run(driver, {str(seed): family.ask(2, family.picture(100 + seed), 2, tokens=1)})
        assert driver.receipt(str(seed)).output_units == 1


@some
@both
def test_jobs_that_leave_hold_nothing(family, device):
    works = {job: family.work(prompt) for job, prompt in prompts_of(family).items()}
    expected = family.truth(prompts_of(family)["other words"])
    for steps in range(1, 8):
        driver = open_driver(family, device(), tier="reference", max_units=9)
        for job, work in works.items():
            driver.submit(job, "m", "chat", work)
        driver.run(steps)
        for job in list(works)[:3]:
            driver.cancel(job)
        driver.finish()
        assert driver.tokens("other words") == expected
