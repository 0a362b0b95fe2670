"""How many held-out films `starter/film` moves the right way, through polymux.

python judge_film.py FOLDER                       the model of a folder
python judge_film.py http://127.0.0.1:8000        starter/film of a running server
"""

from __future__ import annotations

import asyncio
import io
from collections import Counter, defaultdict
from collections.abc import Sequence
from random import Random
from typing import Any

import av
import numpy as np
from film import is_easy
from judging import Asked, make_all, run, sum_up, time_alone
from polymux_starter import DEFAULTS
from scenes import Scene, list_scenes
from served import Reached, is_small, reach
from tracks import find_film_faults
from wording import list_wordings

MODEL = "starter/film"
WAIT = 0.05
"""Seconds between two looks at a job."""


def choose_films(count: int, seed: int, *, small: bool = False) -> list[tuple[Scene, str]]:
    """`count` held-out scenes, every motion as often, each with one of its wordings."""
    chance = Random(seed)
    by_motion: dict[str, list[Scene]] = defaultdict(list)
    for scene in list_scenes(("film",), held_out=True):
        if not small or is_easy(scene):
            by_motion[scene.how].append(scene)
    motions = list(by_motion)
    chosen = [chance.choice(by_motion[motions[turn % len(motions)]]) for turn in range(count)]
    return [(scene, chance.choice(list_wordings(scene))) for scene in chosen]


async def film(model: Reached, prompt: str, seed: int, **more: Any) -> np.ndarray:
    """(frames, height, width, 3) uint8. Raises `RuntimeError` for a job that failed."""
    job = await model.post("videos", {"prompt": prompt, "seed": seed, **more})
    while job["status"] not in ("completed", "failed"):
        await asyncio.sleep(WAIT)
        job = (await model.http.get(f"/v1/videos/{job['id']}")).json()
    if job["status"] == "failed":
        raise RuntimeError(str(job["error"]))
    content = (await model.http.get(f"/v1/videos/{job['id']}/content")).content
    await model.http.delete(f"/v1/videos/{job['id']}")
    with av.open(io.BytesIO(content)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def mark(asked: Asked, clips: Sequence[np.ndarray]) -> dict[str, Any]:
    """The part that moves as asked, "motion" and by motion, the part without any fault, "all", and all faults."""
    right: dict[str, list[bool]] = defaultdict(list)
    faults: Counter[str] = Counter()
    for (scene, _), clip in zip(asked, clips, strict=True):
        found = find_film_faults(clip, scene)
        faults.update(found)
        right["all"].append(not found)
        for name in ("motion", scene.how):
            right[name].append("motion" not in found)
    return sum_up(right, faults)


async def judge_at(where: str, count: int = 200, seed: int = 7) -> dict[str, Any]:
    """`mark`, and the seconds of one clip alone, the median of three."""
    asked = choose_films(count, seed, small=is_small(where))
    async with reach(where, MODEL, DEFAULTS["film"]) as model:
        seconds = await time_alone(film, model, asked[:3])
        clips = await make_all(film, model, asked)
    return {**mark(asked, clips), "seconds": seconds}


if __name__ == "__main__":
    run(__doc__, judge_at, 200)
