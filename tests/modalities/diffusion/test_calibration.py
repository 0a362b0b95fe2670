"""Calibrated presets: measured by the command, read when the model loads, and refused when they are none."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from polymux.core.cache.stepcache import FirstBlock
from polymux.core.cli.frame import run
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError
from polymux.core.models.files import ModelFiles
from polymux.core.testing.pipelines import save_tiny
from polymux.modalities.diffusion.calibrate import CLOSE, Calibration, Trial, read_probes
from polymux.modalities.diffusion.program import load_painter


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd3")
    save_tiny("sd3", folder)
    return folder


def test_a_model_is_calibrated_and_its_presets_follow(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["calibrate", str(folder), "--steps", "12", "--width", "32", "--height", "16", "--device", "cpu"]
    assert run(arguments) == 0
    shown = capsys.readouterr().out
    assert "TeaCache threshold=0.2" in shown
    told = json.loads((folder / "step_cache.json").read_text())
    assert (told["steps"], len(told["ratios"]), told["prompts"], len(told["polynomial"])) == (12, 12, 4, 5)
    assert told["ratios"][0] == 1.0
    presets = load_painter(ModelFiles("sd3", folder), Site(), {}).presets
    assert presets.find("exact", 12) is None
    trials = {trial["rule"]: trial for trial in told["trials"]}
    assert trials.keys() == {"MagCache", "TeaCache", "FirstBlock"}
    for name, bound in CLOSE.items():
        able = [trial for trial in told["trials"] if trial["psnr"] >= bound and trial["skipped"] >= 0.1]
        rule = presets.find(name, 12)
        if not able:
            assert rule is None
            continue
        most = max(able, key=lambda trial: trial["skipped"])
        assert type(rule).__name__ in {trial["rule"] for trial in able if trial["skipped"] == most["skipped"]}
        assert presets.find(name, 4) is None, "too few steps to leave any out"


def test_what_skips_most_and_stays_close_is_chosen() -> None:
    far, near, lazy = FirstBlock(threshold=0.3), FirstBlock(threshold=0.1), FirstBlock(threshold=0.01)
    trials = (Trial(far, 0.6, 22.0), Trial(near, 0.4, 31.0), Trial(lazy, 0.05, 60.0))
    chosen = Calibration(28, (1.0,), (1.0, 0.0), trials).choose("balanced")
    assert chosen is not None
    assert chosen.rule is near
    assert Calibration(28, (1.0,), (1.0, 0.0), (trials[0], trials[2])).choose("fast") is None, (
        "off where it cannot help"
    )


def test_teacache_is_fitted_to_how_residuals_follow_the_modulated_input() -> None:
    moved = torch.linspace(0.05, 0.4, 20)
    measured = torch.stack([torch.ones(20), moved, 0.1 + 2 * moved**2], 1)
    ratios, polynomial = read_probes([torch.cat([torch.tensor([[1.0, 0, 0]]), measured])])
    assert ratios == (1.0,) * 21
    assert np.polyval(polynomial, 0.3) == pytest.approx(0.28, rel=1e-3)


@pytest.mark.parametrize(
    "text",
    [
        '{"ratios": ["a"]}',
        '{"ratios": [1], "polynomial": [], "presets": {"balanced": {"rule": "StepRule"}, "fast": null}}',
        '{"ratios": [1], "polynomial": [], "presets": {"balanced": {"rule": "MagCache", "colour": 1}, "fast": null}}',
        '{"ratios": [], "polynomial": [], "presets": {"balanced": {"rule": "DeepCache", "interval": "a"}}}',
    ],
)
def test_a_broken_calibration_is_refused(folder: Path, tmp_path: Path, text: str) -> None:
    broken = tmp_path / "ratios.json"
    broken.write_text(text)
    with pytest.raises(ConfigError, match="polymux calibrate"):
        load_painter(ModelFiles("sd3", folder), Site(), {"calibration": str(broken)})


def test_without_prompts_there_is_nothing_to_calibrate_with(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n \n")
    assert run(["calibrate", str(folder), "--device", "cpu", "--prompts", str(tmp_path / "prompts.txt")]) != 0


def test_of_a_unet_the_intervals_are_tried(tmp_path: Path) -> None:
    save_tiny("sd", tmp_path)
    one = tmp_path / "prompts.txt"
    one.write_text("a fox\n")
    assert run(["calibrate", str(tmp_path), "--steps", "12", "--device", "cpu", "--prompts", str(one)]) == 0
    told = json.loads((tmp_path / "step_cache.json").read_text())
    assert [trial["interval"] for trial in told["trials"]] == [2, 3, 5]
    assert [trial["skipped"] for trial in told["trials"]] == sorted(trial["skipped"] for trial in told["trials"])
    assert load_painter(ModelFiles("sd", tmp_path), Site(), {}).presets.find("exact", 12) is None
