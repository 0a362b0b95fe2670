"""What a model says of itself is what was done and measured, and its recipe can be tried on a processor."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import loop
import pytest
import torch
from polymux_starter import MODELS, TRAINED
from scenes import Scene, Thing
from transformers import AutoTokenizer, SiglipModel

ROOT = Path(__file__).parents[3]
JUDGED = {
    "see": ("see: of 1,000 held-out questions right",),
    "look": (
        "look: of 200 held-out pictures that find their caption",
        "look: of 200 held-out captions that find their picture",
    ),
    "paint": ("paint: of 500 held-out prompts drawn right",),
    "film": ("film: of 200 held-out films that move as asked", "film: of 200 held-out films without any fault"),
}


@pytest.mark.parametrize("name", TRAINED)
def test_a_card_tells_what_was_measured_last(name: str) -> None:
    lines = (ROOT / "benchmarks" / "results" / "RESULTS.jsonl").read_text().splitlines()
    newest = {figure["metric"]: figure["value"] for figure in map(json.loads, lines)}
    card = (MODELS / name / "README.md").read_text()
    evaluation = card.split("## Evaluation")[1].split("## Limits")[0]
    told = {float(part) for part in re.findall(r"([\d.]+)%", evaluation)}
    for metric in JUDGED[name]:
        assert round(newest[metric] * 100, 1) in told, metric


@pytest.mark.parametrize("name", TRAINED)
def test_a_card_tells_of_the_run_once(name: str) -> None:
    """A budget is not what was done: steps that the clock did not allow are not told."""
    rows = re.findall(r"^\| ([^|]+) \|", (MODELS / name / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == len(set(rows)), rows
    run = json.loads((MODELS / name / "training.json").read_text())
    assert {"date", "device", "seed", "batch", "steps", "minutes", "parameters"} <= run.keys()
    assert "loss" in run.get("last", run)


def test_texts_are_read_by_transformers_as_look_was_trained() -> None:
    """Padded, without a mask: what its processor makes of a text is told by the folder alone."""
    captions = ["a large red star at the top", Scene("count", (Thing("ring", "blue"),) * 3).caption]
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "look")
    told = tokenizer(captions, padding="max_length", return_tensors="pt")
    assert told.keys() == {"input_ids"}
    assert told["input_ids"].shape == (2, 32)
    vectors = SiglipModel.from_pretrained(MODELS / "look").get_text_features(**told).pooler_output
    assert torch.isfinite(vectors).all()


def test_a_small_run_is_one_for_a_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(*told: str) -> tuple[int, int]:
        monkeypatch.setattr(sys, "argv", ["recipe.py", "--out", str(tmp_path), *told])
        wanted = loop.read_arguments("", steps=7000, batch=512, rate=1e-3, small=(600, 32))
        return wanted.steps, wanted.batch

    assert read() == (7000, 512)
    assert read("--small") == (600, 32)
    assert read("--small", "--steps", "3") == (3, 32)


@pytest.mark.slow
def test_painting_leaves_a_recipe_its_own_minutes(tmp_path: Path) -> None:
    """The minutes that made the weights are each recipe's default; one for both would be too few for one of them."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "{\\"run\\": \\"$*\\"}"\n')
    python.chmod(0o755)
    script = MODELS.parents[1] / "train" / "painting.sh"

    def run(**more: str) -> str:
        env = {"PATH": "/usr/bin:/bin", "OUT": str(tmp_path), "PYTHON": str(python), "ONLY": "film", **more}
        return subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True).stdout

    assert "--minutes" not in run()
    assert "--minutes 3" in run(MINUTES="3")
