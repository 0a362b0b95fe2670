"""How many questions about held-out scenes `starter/see` answers right, through polymux.

python judge_see.py FOLDER                       the model of a folder
python judge_see.py http://127.0.0.1:8000        starter/see of a running server
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass
from random import Random

import torch
from eye import SMALL, WHOLE
from judging import run
from pictures import Easel
from questions import ASKED, Question, list_questions
from scenes import list_scenes
from served import Reached, is_small, reach, write_url

AT_ONCE = 16
ALONE = 20
"""Questions asked one by one, to see how long one takes."""


@dataclass(frozen=True)
class Shown:
    """A question about a picture, which is a data URI."""

    question: Question
    url: str


def draw_questions(families: tuple[str, ...], count: int, seed: int, side: int = 64) -> list[Shown]:
    """`count` questions about pictures of held-out scenes, every subject as often."""
    chance = Random(seed)
    scenes = list_scenes(families, held_out=True)
    by_subject: dict[str, dict[str, list[tuple[int, Question]]]] = defaultdict(lambda: defaultdict(list))
    for number, scene in enumerate(scenes):
        for question in list_questions(scene):
            by_subject[question.subject][scene.family].append((number, question))
    subjects = [subject for subject in ASKED if subject in by_subject]
    chosen = []
    for turn in range(count):
        families_asked = by_subject[subjects[turn % len(subjects)]]
        chosen.append(chance.choice(families_asked[chance.choice(list(families_asked))]))
    easel, generator = Easel(scenes, side), torch.Generator().manual_seed(seed)
    pictures = easel.draw(easel.lay(torch.tensor([number for number, _ in chosen]), generator))
    return [Shown(question, write_url(picture)) for (_, question), picture in zip(chosen, pictures, strict=True)]


async def ask(model: Reached, url: str, text: str) -> str:
    """What the model answers to a question about a picture."""
    content = [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}]
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, "max_tokens": 32}
    answer = await model.post("chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def is_right(said: str, answer: str) -> bool:
    return said.strip().rstrip(".").lower() == answer.lower()


async def judge(model: Reached, asked: list[Shown]) -> dict[str, float]:
    """The part of questions answered right, "all" and by subject, and "seconds" of one alone, the median."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(shown: Shown) -> bool:
        async with gate:
            return is_right(await ask(model, shown.url, shown.question.text), shown.question.answer)

    seconds = []
    for shown in asked[:ALONE]:
        begun = time.monotonic()
        await ask(model, shown.url, shown.question.text)
        seconds.append(time.monotonic() - begun)
    found = await asyncio.gather(*map(one, asked))
    right: dict[str, list[bool]] = defaultdict(list)
    for shown, each in zip(asked, found, strict=True):
        right["all"].append(each)
        right[shown.question.subject].append(each)
    return {**{name: statistics.mean(each) for name, each in right.items()}, "seconds": statistics.median(seconds)}


async def judge_at(where: str, count: int = 1000, seed: int = 7) -> dict[str, float]:
    size = SMALL if is_small(where) else WHOLE
    async with reach(where, "starter/see") as model:
        return await judge(model, draw_questions(size.families, count, seed))


if __name__ == "__main__":
    run(__doc__, judge_at, 1000)
