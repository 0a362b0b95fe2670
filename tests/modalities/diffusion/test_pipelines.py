"""Every kind of diffusers folder: what diffusers' own pipeline makes of it, alone and among others."""

from __future__ import annotations

import io
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from diffusers.pipelines.wan import pipeline_wan_i2v
from PIL import Image

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site
from polymux.core.models.files import ModelFiles
from polymux.core.tasks import Film, Paint
from polymux.core.testing.drive import Driver
from polymux.core.testing.pipelines import BUILDERS, save_tiny
from polymux.modalities.diffusion.front import PaintFront
from polymux.modalities.diffusion.plugin import Filming, Painting
from polymux.modalities.diffusion.program import PaintProgram
from polymux.modalities.diffusion.work import PICTURE, Painted

DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}
FRAMES = 5
PROMPTS = ("The quick brown fox", "a lazy dog jumps over Paris, the capital of France", "the end")


def picture_file(size: tuple[int, int]) -> bytes:
    noise = np.random.default_rng(3).integers(0, 255, (size[1], size[0], 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    return file.getvalue()


@dataclass(frozen=True)
class Wish:
    """What a user asks for."""

    prompt: str = PROMPTS[0]
    negative: str | None = None
    scale: float = 4.0
    steps: int = 4
    seed: int = 1
    size: tuple[int, int] = (32, 16)

    def ask(self, kind: str) -> Paint:
        fields: dict[str, Any] = {
            "prompt": self.prompt,
            "negative": self.negative,
            "guidance": self.scale,
            "steps": self.steps,
            "seed": self.seed,
            "width": self.size[0],
            "height": self.size[1],
        }
        if not kind.startswith("wan"):
            return Paint(**fields)
        source = picture_file(self.size) if "picture" in kind else None
        return Film(**fields, frames=FRAMES, source=source)


WISHES = [
    Wish(),
    Wish(negative="lazy", seed=2, steps=7),
    Wish(PROMPTS[1], scale=2.0, seed=3, steps=3),
    Wish(PROMPTS[2], scale=1.0, seed=4, steps=5),
    Wish(size=(16, 32), seed=5, steps=2),
    Wish(PROMPTS[1], "the", scale=7.0, seed=6, steps=6),
    Wish(PROMPTS[2], size=(16, 32), seed=7),
    Wish(seed=8, steps=9, scale=3.0),
]


@pytest.fixture(scope="module", params=list(BUILDERS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("model")
    return Model(request.param, folder, save_tiny(request.param, folder))


@dataclass
class Model:
    kind: str
    folder: Path
    peer: Any

    @property
    def files(self) -> ModelFiles:
        return ModelFiles(self.kind, self.folder)

    def front(self) -> PaintFront:
        return PaintFront.load(self.files)

    def drive(self, device: Device) -> Driver:
        """A driver of a loop that serves the model as `m`."""
        site = Site(device)
        pipeline = Filming() if self.kind.startswith("wan") else Painting()
        assert pipeline.accepts(self.files)
        program = pipeline.load(self.files, site, {})
        assert isinstance(program, PaintProgram)
        return Driver(Loop(site, {"m": program}))

    def submit(self, driver: Driver, job: str, wish: Wish) -> None:
        task = "video" if self.kind.startswith("wan") else "image"
        work = self.front().prepare(task, wish.ask(self.kind)).work
        assert work is not None
        driver.submit(job, "m", task, work)

    def paint_alone(self, wish: Wish) -> np.ndarray:
        """diffusers' pipeline, from 0 to 1."""
        options: dict[str, Any] = {
            "prompt": wish.prompt,
            "negative_prompt": wish.negative,
            "guidance_scale": wish.scale,
            "num_inference_steps": wish.steps,
            "width": wish.size[0],
            "height": wish.size[1],
            "generator": torch.Generator().manual_seed(wish.seed),
            "output_type": "np",
        }
        if self.kind == "qwen":
            del options["guidance_scale"]
            options |= {"true_cfg_scale": wish.scale, "negative_prompt": wish.negative or " "}
        if self.kind == "pixart":
            options |= {"use_resolution_binning": False, "clean_caption": False}
            options["negative_prompt"] = wish.negative or ""
        if self.kind.startswith("wan"):
            options["num_frames"] = FRAMES
            if "picture" in self.kind:
                pipeline_wan_i2v.ftfy = SimpleNamespace(fix_text=str)  # it forgets that it may be missing
                options["image"] = Image.open(io.BytesIO(picture_file(wish.size)))
            frames: np.ndarray = self.peer(**options).frames[0]
            return frames
        image: np.ndarray = self.peer(**options).images[0]
        return image


def read(driver: Driver, job: str) -> np.ndarray:
    [painted] = driver.outputs(job, PICTURE, Painted)
    return painted.pixels / 255


def assert_same(ours: np.ndarray, theirs: np.ndarray) -> None:
    """To half a level of a byte, and not because everything is grey."""
    np.testing.assert_allclose(ours, theirs, atol=0.5 / 255 + 2e-4)
    assert theirs.std() > 0.01


def test_one_request_is_the_picture_of_diffusers(model: Model) -> None:
    for name, wish in {"plain": WISHES[0], "negative": WISHES[1], "unguided": WISHES[3]}.items():
        driver = model.drive(Device())
        model.submit(driver, name, wish)
        driver.finish()
        assert driver.error(name) is None
        assert_same(read(driver, name), model.paint_alone(wish))


@pytest.mark.parametrize("device", DEVICES)
def test_eight_at_once_are_each_as_alone(model: Model, device: str) -> None:
    """Different steps, guidance, seeds, sizes, prompts and arrivals, in shared passes: the same pictures."""
    driver = model.drive(DEVICES[device]())
    for number, wish in enumerate(WISHES):
        model.submit(driver, str(number), wish)
        driver.run(steps=2)
    driver.finish()
    alone = [model.paint_alone(wish) for wish in WISHES]
    for number, picture in enumerate(alone):
        assert_same(read(driver, str(number)), picture)
    assert np.abs(alone[0] - alone[7]).max() > 0.02, "seeds and steps must matter"
