"""How often `starter/look` finds a held-out picture's caption among 200, and a caption's picture, through polymux.

python judge_look.py FOLDER                      the model of a folder
python judge_look.py http://127.0.0.1:8000       starter/look of a running server
"""

from __future__ import annotations

from random import Random

import torch
from eye import SMALL, WHOLE
from judging import run
from pictures import Easel
from scenes import Scene, list_scenes
from served import Reached, is_small, reach, write_url
from torch import Tensor

AT_ONCE = 50
"""Inputs of a request."""


def choose_scenes(families: tuple[str, ...], count: int, seed: int) -> list[Scene]:
    """Held-out scenes, of each family as many as there are, up to its share of `count`."""
    chance = Random(seed)
    pools = [list_scenes((family,), held_out=True) for family in families]
    for pool in pools:
        chance.shuffle(pool)
    chosen: list[Scene] = []
    while len(chosen) < count and any(pools):
        chosen += [pool.pop() for pool in pools if pool]
    return chosen[:count]


async def embed(model: Reached, inputs: list[object]) -> Tensor:
    """(inputs, dim), of unit length."""
    vectors: list[list[float]] = []
    for first in range(0, len(inputs), AT_ONCE):
        answer = await model.post("embeddings", {"input": inputs[first : first + AT_ONCE]})
        vectors += [each["embedding"] for each in answer["data"]]
    return torch.tensor(vectors)


async def judge(model: Reached, scenes: list[Scene], seed: int, side: int = 64) -> dict[str, float]:
    """Top-1 among all scenes: of pictures that find their caption, and of captions that find their picture."""
    easel, generator = Easel(scenes, side), torch.Generator().manual_seed(seed)
    pictures = easel.draw(easel.lay(torch.arange(len(scenes)), generator))
    shown = [{"type": "image_url", "image_url": {"url": write_url(picture)}} for picture in pictures]
    seen, told = await embed(model, [*shown]), await embed(model, [scene.caption for scene in scenes])
    angles, own = seen @ told.T, torch.arange(len(scenes))
    return {
        "captions": float((angles.argmax(1) == own).float().mean()),
        "pictures": float((angles.argmax(0) == own).float().mean()),
        "scenes": float(len(scenes)),
    }


async def judge_at(where: str, count: int = 200, seed: int = 7) -> dict[str, float]:
    size = SMALL if is_small(where) else WHOLE
    async with reach(where, "starter/look") as model:
        return await judge(model, choose_scenes(size.families, count, seed), seed)


if __name__ == "__main__":
    run(__doc__, judge_at, 200)
