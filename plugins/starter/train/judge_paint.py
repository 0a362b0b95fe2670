"""How many held-out prompts `starter/paint` draws right, through polymux.

python judge_paint.py FOLDER                       the model of a folder
python judge_paint.py http://127.0.0.1:8000        starter/paint of a running server
"""

from __future__ import annotations

import base64
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
from judging import Asked, make_all, run, sum_up, time_alone
from paint import Paint, is_easy
from PIL import Image
from polymux_starter import DEFAULTS
from scenes import Scene, list_scenes
from served import Reached, is_small, reach
from verdicts import find_faults
from wording import list_wordings

MODEL = "starter/paint"
ASKED = ("one", "pair", "count", "one", "pair", "count", "digit", "word")
"""Families in turn."""


def choose_prompts(count: int, seed: int, *, small: bool = False) -> list[tuple[Scene, str]]:
    """`count` held-out scenes, each with one of its wordings."""
    chance = Random(seed)
    kept = [scene for scene in list_scenes(tuple(Paint.families), held_out=True) if not small or is_easy(scene)]
    by_family: dict[str, list[Scene]] = defaultdict(list)
    for scene in kept:
        by_family[scene.family].append(scene)
    families = [family for family in ASKED if family in by_family]
    chosen = [chance.choice(by_family[families[turn % len(families)]]) for turn in range(count)]
    return [(scene, chance.choice(list_wordings(scene))) for scene in chosen]


async def paint(model: Reached, prompt: str, seed: int, **more: Any) -> np.ndarray:
    """(height, width, 3) uint8."""
    answer = await model.post("images/generations", {"prompt": prompt, "seed": seed, **more})
    file = io.BytesIO(base64.b64decode(answer["data"][0]["b64_json"]))
    return np.array(Image.open(file).convert("RGB"))


def mark(asked: Asked, pictures: Sequence[np.ndarray]) -> dict[str, Any]:
    """The part drawn right, "all" and by family, and how often each fault was found."""
    right: dict[str, list[bool]] = defaultdict(list)
    faults: Counter[str] = Counter()
    for (scene, _), picture in zip(asked, pictures, strict=True):
        found = find_faults(picture, scene)
        faults.update(found)
        for name in ("all", scene.family):
            right[name].append(not found)
    return sum_up(right, faults)


async def judge_at(where: str, count: int = 500, seed: int = 7) -> dict[str, Any]:
    """`mark`, and the seconds of one picture alone, the median of five."""
    asked = choose_prompts(count, seed, small=is_small(where))
    async with reach(where, MODEL, DEFAULTS["paint"]) as model:
        seconds = await time_alone(paint, model, asked[:5])
        pictures = await make_all(paint, model, asked)
    return {**mark(asked, pictures), "seconds": seconds}


if __name__ == "__main__":
    run(__doc__, judge_at, 500)
