"""How many questions about what `starter/paint` painted `starter/see` answers as the prompt has it, through polymux.

python judge_loop.py PAINT SEE                       the models of two folders
python judge_loop.py http://127.0.0.1:8000           both of a running server
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
from random import Random

import judge_paint
import numpy as np
import torch
from judge_see import ask, is_right
from judging import make_all
from polymux_starter import DEFAULTS
from questions import ASKED, Question, list_questions
from scenes import Scene
from served import is_small, reach, write_url
from verdicts import find_faults


def choose_question(scene: Scene, chance: Random) -> Question | None:
    """One of the subjects that are judged; None: the scene has none of them (a word)."""
    fitting = [question for question in list_questions(scene) if question.subject in ASKED]
    return chance.choice(fitting) if fitting else None


def show(picture: np.ndarray) -> str:
    """(height, width, 3) uint8 as a data URI."""
    return write_url(torch.tensor(picture).permute(2, 0, 1) / 255)


async def judge_at(paint: str, see: str, count: int = 300, seed: int = 7) -> dict[str, float]:
    """The part of answers that fit the prompt: "all", and "drawn right", where the pixels' judge finds no fault."""
    chance = Random(seed)
    chosen = judge_paint.choose_prompts(count, seed, small=is_small(paint))
    asked = [(scene, prompt, choose_question(scene, chance)) for scene, prompt in chosen]
    kept = [(scene, prompt, question) for scene, prompt, question in asked if question is not None]
    async with reach(paint, judge_paint.MODEL, DEFAULTS["paint"]) as painter:
        pictures = await make_all(judge_paint.paint, painter, [(scene, prompt) for scene, prompt, _ in kept])
    async with reach(see, "starter/see") as seer:
        said = await asyncio.gather(
            *(ask(seer, show(picture), question.text) for picture, (_, _, question) in zip(pictures, kept, strict=True))
        )
    fit = [is_right(each, question.answer) for each, (_, _, question) in zip(said, kept, strict=True)]
    right = [not find_faults(picture, scene) for picture, (scene, _, _) in zip(pictures, kept, strict=True)]
    return {
        "all": statistics.mean(fit),
        "drawn right": statistics.mean([each for each, drawn in zip(fit, right, strict=True) if drawn] or [0.0]),
        "pictures drawn right": statistics.mean(right),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("paint")
    parser.add_argument("see", nargs="?", help="default: where paint is")
    parser.add_argument("--count", type=int, default=300)
    told = parser.parse_args()
    print(json.dumps(asyncio.run(judge_at(told.paint, told.see or told.paint, told.count))))
