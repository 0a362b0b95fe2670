"""The recipes of the starters that paint and film end in ordinary folders of diffusers, which polymux serves alike."""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import autoencoding
import course
import film
import judge_film
import judge_paint
import numpy as np
import paint
import pytest
import torch
from diffusers import FluxPipeline, WanPipeline
from polymux_starter import DEFAULTS, MODELS
from scenes import list_scenes
from served import reach

FEW = course.Budget(examples=8, batch=4, steps=3, vae_batch=2, vae_steps=3)
PAINT = paint.Paint(heads=2, singles=1, text=32, vae=(4, 8, 8), length=16)
FILM = film.Film(heads=2, layers=2, text=32, base=4, side=16, frames=5, length=12)
PROMPT = "a large red circle at the left, please"


def options(out: Path, **more: Any) -> argparse.Namespace:
    told = {"seed": 0, "device": "cpu", "minutes": 5.0, "steps": None, "small": True, "resume": None, "eager": True}
    return argparse.Namespace(out=out, **{**told, **more})


def train(kind: course.Course, out: Path, **more: Any) -> Path:
    scenes = list_scenes(tuple(kind.families), held_out=False)[:20]
    course.train(kind, FEW, scenes, scenes[:2], options(out, **more))
    return out


@pytest.fixture(scope="module")
def painter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(PAINT, tmp_path_factory.mktemp("paint"))


@pytest.fixture(scope="module")
def filmer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(FILM, tmp_path_factory.mktemp("film"))


def test_a_picture_is_the_one_of_diffusers(painter: Path) -> None:
    """Steps, guidance and size come from the starter's options, the length of texts from the tokenizers."""

    async def ask() -> np.ndarray:
        async with reach(str(painter), judge_paint.MODEL, {**DEFAULTS["paint"], "steps": 4}) as model:
            return await judge_paint.paint(model, PROMPT, 5)

    served = asyncio.run(ask())
    assert served.shape == (64, 64, 3)
    pipeline = FluxPipeline.from_pretrained(painter, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    alone = pipeline(
        PROMPT,
        negative_prompt="",
        true_cfg_scale=DEFAULTS["paint"]["scale"],
        height=64,
        width=64,
        num_inference_steps=4,
        max_sequence_length=PAINT.length,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).images[0]
    assert np.abs(served / 255 - alone).max() <= 1 / 255 + 1e-3


def test_a_clip_is_the_one_of_diffusers(filmer: Path) -> None:
    small = {**DEFAULTS["film"], "size": "16x16", "frames": 5, "steps": 4}

    async def ask() -> np.ndarray:
        async with reach(str(filmer), judge_film.MODEL, small) as model:
            return await judge_film.film(model, PROMPT, 5)

    served = asyncio.run(ask())
    assert served.shape == (5, 16, 16, 3)
    pipeline = WanPipeline.from_pretrained(filmer, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    alone = pipeline(
        PROMPT,
        negative_prompt="",
        guidance_scale=DEFAULTS["film"]["scale"],
        height=16,
        width=16,
        num_frames=5,
        num_inference_steps=4,
        max_sequence_length=FILM.length,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
    ).frames[0]
    assert np.abs(served / 255 - alone).mean() < 0.05  # a film is a file of a lossy format


def test_a_folder_has_its_card_its_run_and_halves(painter: Path, filmer: Path) -> None:
    for folder, steps in ((painter, FEW.steps), (filmer, FEW.steps)):
        run = json.loads((folder / "training.json").read_text())
        assert run["steps"] == steps and run["small"] and run["seed"] == 0 and run["minutes"] >= 0
        assert f"| steps | {steps} |" in (folder / "README.md").read_text()
        assert (folder / "looks.png").is_file()
        from safetensors import safe_open

        for path in folder.rglob("*.safetensors"):
            with safe_open(path, "pt") as file:
                assert {str(file.get_tensor(name).dtype) for name in file.keys()} == {"torch.float16"}  # noqa: SIM118


def test_channels_are_evened_out_without_a_change_of_the_picture() -> None:
    vae = PAINT.make(course.build_tokenizer(["a red circle"], PAINT.length)).vae
    pictures = torch.rand(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = autoencoding.encode(vae, pictures)
        shown = vae.decode(before).sample
    deviation = before.std((0, 2, 3))
    autoencoding.even_out(vae, deviation)
    after = autoencoding.encode(vae, pictures)
    torch.testing.assert_close(after.std((0, 2, 3)), torch.ones_like(deviation))
    with torch.no_grad():
        torch.testing.assert_close(vae.decode(after).sample, shown, atol=1e-5, rtol=1e-4)


def test_a_run_goes_on_from_a_folder(painter: Path, tmp_path: Path) -> None:
    """What a call that was cut off has left is the beginning of the next; the VAE stays, or latents would change."""
    on = train(PAINT, tmp_path, resume=painter, steps=2)
    name = "vae/diffusion_pytorch_model.safetensors"
    assert (on / name).read_bytes() == (painter / name).read_bytes()
    run = json.loads((on / "training.json").read_text())
    assert run["steps"] == 2 and "vae loss" not in run
    assert run["before"][0]["steps"] == FEW.steps and "vae loss" in run["before"][0]


def test_the_real_sizes_fit_their_budgets() -> None:
    """8 MB for the painter and 5 MB for the filmer, in half precision."""
    for kind, most in ((paint.Paint(), 8e6), (film.Film(), 5e6)):
        tokenizer = course.build_tokenizer(["a red circle"], kind.length)
        parts = [part for part in kind.make(tokenizer).components.values() if isinstance(part, torch.nn.Module)]
        assert 2 * sum(weight.numel() for part in parts for weight in part.parameters()) < most - 2e5


@pytest.mark.parametrize("name", ["paint", "film"])
def test_the_weights_are_whole_and_small(name: str) -> None:
    folder = MODELS / name
    assert (
        sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < {"paint": 8.2e6, "film": 5.2e6}[name]
    )
    run = json.loads((folder / "training.json").read_text())
    assert not run["small"] and run["device"] and run["minutes"]
    assert "TRAINING" not in (folder / "README.md").read_text()


# Samples of what `benchmarks/starters.py` asks, with room for their chance.


@pytest.fixture(scope="module")
def painted() -> dict[str, Any]:
    return asyncio.run(judge_paint.judge_at(str(MODELS / "paint"), 40, seed=1))


@pytest.mark.slow
def test_a_single_thing_is_painted_as_asked(painted: dict[str, Any]) -> None:
    assert painted["one"] >= 0.9, painted


@pytest.mark.slow
def test_what_is_painted_is_what_was_asked_for(painted: dict[str, Any]) -> None:
    assert painted["all"] >= 0.85, painted


@pytest.mark.slow
def test_what_is_filmed_is_what_was_asked_for() -> None:
    assert asyncio.run(judge_film.judge_at(str(MODELS / "film"), 24, seed=1))["motion"] >= 0.8
