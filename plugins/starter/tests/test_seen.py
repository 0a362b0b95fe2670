"""The starters that see, as they are served: what a recipe writes, and what the weights in the repository know."""

from __future__ import annotations

import asyncio
import json
import sys
from importlib import import_module
from pathlib import Path

import judge_look
import judge_loop
import judge_see
import pytest
from polymux_starter import MODELS
from safetensors import safe_open

BUDGET = {"see": 8_000_000, "look": 4_000_000}
"""Bytes of a folder at most."""


@pytest.mark.parametrize("name", ["see", "look"])
def test_a_folder_is_small_half_precision_and_says_how_it_was_made(name: str) -> None:
    folder = MODELS / name
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "preprocessor_config.json"} <= files.keys()
    assert sum(files.values()) < BUDGET[name]
    with safe_open(folder / "model.safetensors", "pt") as weights:
        assert {weights.get_slice(key).get_dtype() for key in weights.keys()} == {"F16"}  # noqa: SIM118
    run = json.loads((folder / "training.json").read_text())
    assert not run["small"] and run["device"] and run["minutes"] and run["seed"]
    card = (folder / "README.md").read_text()
    assert f"| seed | {run['seed']} |" in card and "TRAINING" not in card


@pytest.mark.slow
def test_held_out_questions_are_answered() -> None:
    """A sample of what `benchmarks/starters.py` asks, with room for its chance."""
    found = asyncio.run(judge_see.judge_at(str(MODELS / "see"), count=120))
    assert found["all"] >= 0.9, found


@pytest.mark.slow
def test_held_out_captions_find_their_pictures() -> None:
    found = asyncio.run(judge_look.judge_at(str(MODELS / "look"), count=100))
    assert min(found["captions"], found["pictures"]) >= 0.9, found


@pytest.mark.slow
def test_what_was_painted_is_seen() -> None:
    """Two models that were never shown each other's work mean the same by a word."""
    found = asyncio.run(judge_loop.judge_at(str(MODELS / "paint"), str(MODELS / "see"), count=24))
    assert found["drawn right"] >= 0.9, found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["see", "look"])
def test_what_a_recipe_writes_is_served(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of training, then the folder behind the gateway, asked by the judge."""
    told = ["--small", "--out", str(tmp_path), "--steps", "1", "--batch", "2", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *told])
    import_module(name).main()
    judge = {"see": judge_see, "look": judge_look}[name]
    found = asyncio.run(judge.judge_at(str(tmp_path / "model"), count=10))
    assert all(0 <= found[key] <= 1 for key in {"see": ("all",), "look": ("captions", "pictures")}[name])
    assert "| small | True |" in (tmp_path / "model" / "README.md").read_text()
