"""What a small model's folder and its options say stands in for what its kind does by default."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polymux.core.errors import ConfigError, InvalidRequest
from polymux.core.models.files import ModelFiles
from polymux.core.tasks import Film, Paint
from polymux.core.testing.painting import save_tiny_flux
from polymux.core.testing.pipelines import save_tiny
from polymux.modalities.diffusion.front import PaintFront
from polymux.modalities.diffusion.work import PaintWork


@pytest.fixture(scope="module")
def flux(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("flux")
    save_tiny_flux(folder)
    return folder


@pytest.fixture(scope="module")
def wan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wan")
    save_tiny("wan", folder)
    return folder


def prepare(folder: Path, options: dict[str, Any], ask: Paint | Film) -> PaintWork:
    front = PaintFront.load(ModelFiles("tiny", folder), options)
    work = front.prepare("video" if isinstance(ask, Film) else "image", ask).work
    assert isinstance(work, PaintWork)
    return work


def test_options_are_the_defaults_of_a_picture(flux: Path) -> None:
    """FLUX folders of the kind of schnell paint in 4 steps without guidance: not every such model was distilled."""
    options = {"steps": 20, "scale": 2.5, "size": "24x16"}
    work = prepare(flux, options, Paint(prompt="a fox"))
    assert (work.steps, work.scale, work.width, work.height) == (20, 2.5, 24, 16)
    assert work.negative is not None and work.negative.empty
    asked = prepare(flux, options, Paint(prompt="a fox", steps=3, guidance=1.0, width=16, height=16))
    assert (asked.steps, asked.scale, asked.width, asked.negative) == (3, 1.0, 16, None)


def test_options_are_the_defaults_of_a_clip(wan: Path) -> None:
    options = {"size": "32x16", "frames": 5, "fps": 8}
    work = prepare(wan, options, Film(prompt="a fox"))
    assert (work.width, work.height, work.frames) == (32, 16, 5)
    facts = PaintFront.load(ModelFiles("tiny", wan), options).describe()
    assert (facts["frames_per_second"], facts["default_frames"], facts["default_size"]) == (8, 5, "32x16")


def test_a_bound_holds_for_what_a_picture_and_a_clip_have(flux: Path, wan: Path) -> None:
    prepare(flux, {"max_pixels": 256}, Paint(prompt="a fox", width=16, height=16))
    with pytest.raises(InvalidRequest, match="24x16 have more than the 256 pixels"):
        prepare(flux, {"max_pixels": 256}, Paint(prompt="a fox", width=24, height=16))
    prepare(wan, {"max_pixels": 16 * 16 * 5}, Film(prompt="a fox", width=16, height=16, frames=5))
    with pytest.raises(InvalidRequest, match="9 frames of 16x16"):
        prepare(wan, {"max_pixels": 16 * 16 * 5}, Film(prompt="a fox", width=16, height=16, frames=9))


@pytest.mark.parametrize(
    "options",
    [
        {"steps": 0},
        {"steps": True},
        {"steps": "20"},
        {"scale": float("nan")},
        {"scale": float("inf")},
        {"size": "64"},
        {"size": 64},
        {"size": "0x64"},
        {"frames": 5},
        {"max_pixels": -1},
    ],
    ids=str,
)
def test_an_option_that_cannot_be_is_named(flux: Path, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"option {next(iter(options))} "):
        PaintFront.load(ModelFiles("tiny", flux), options)


def test_frames_divide_as_the_model_makes_them(wan: Path) -> None:
    for frames in (4, 0, "5", 2.5):
        with pytest.raises(ConfigError, match="option frames"):
            PaintFront.load(ModelFiles("tiny", wan), {"frames": frames})


def test_a_shorter_tokenizer_shortens_what_is_read(flux: Path, tmp_path: Path) -> None:
    """diffusers pads CLIP's texts to its tokenizer's `model_max_length`; a small T5 need not read 512 tokens either."""
    long = prepare(flux, {}, Paint(prompt="fox"))
    assert [len(ids) for ids in long.prompt.ids] == [77, 512]
    for file in flux.rglob("*"):
        if file.is_file() and "tokenizer" in str(file):
            target = tmp_path / file.relative_to(flux)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(file.read_bytes())
    for name in ("model_index.json", "transformer/config.json", "vae/config.json"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes((flux / name).read_bytes())
    for name, length in (("tokenizer", 20), ("tokenizer_2", 32)):
        path = tmp_path / name / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "model_max_length": length}))
    short = prepare(tmp_path, {}, Paint(prompt="fox"))
    assert [len(ids) for ids in short.prompt.ids] == [20, 32]
    assert short.prompt.lengths == long.prompt.lengths
