"""Calibrated presets: measured by the command, read when the model loads, and refused when they are none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polymux.core.cache.stepcache import MagCache
from polymux.core.cli.frame import run
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError
from polymux.core.models.files import ModelFiles
from polymux.core.testing.pipelines import save_tiny
from polymux.modalities.diffusion.program import load_painter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    save_tiny("sd3", folder)
    return folder


def test_a_model_is_calibrated_and_its_presets_follow(folder: Path) -> None:
    arguments = ["calibrate", str(folder), "--steps", "12", "--width", "32", "--height", "16", "--device", "cpu"]
    assert run(arguments) == 0
    told = json.loads((folder / "step_cache.json").read_text())
    assert (told["steps"], len(told["ratios"]), told["prompts"]) == (12, 12, 4)
    assert told["ratios"][0] == 1.0
    presets = load_painter(ModelFiles("sd3", folder), Site(), {}).presets
    balanced, fast = presets.find("balanced", 12), presets.find("fast", 12)
    assert isinstance(balanced, MagCache)
    assert isinstance(fast, MagCache)
    assert fast.threshold > balanced.threshold
    assert presets.find("exact", 12) is None
    assert presets.find("fast", 4) is None, "too few steps to leave any out"


def test_a_broken_calibration_is_refused(folder: Path, tmp_path: Path) -> None:
    broken = tmp_path / "ratios.json"
    broken.write_text('{"ratios": ["a"]}')
    with pytest.raises(ConfigError, match="polymux calibrate"):
        load_painter(ModelFiles("sd3", folder), Site(), {"calibration": str(broken)})


def test_a_unet_needs_none(tmp_path: Path) -> None:
    save_tiny("sd", tmp_path)
    assert run(["calibrate", str(tmp_path), "--steps", "12", "--device", "cpu"]) != 0
