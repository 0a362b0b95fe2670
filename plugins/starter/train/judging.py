"""What all judges do alike: ask some at once, time a few alone, count what is right, and be called from a shell."""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
from scenes import Scene
from served import Reached

AT_ONCE = 4

Asked = Sequence[tuple[Scene, str]]
"""Held-out scenes, each with one of its wordings."""

Make = Callable[..., Awaitable[np.ndarray]]
"""(model, prompt, seed, further fields of the request) to a picture or a clip."""


async def make_all(make: Make, model: Reached, asked: Asked, **more: Any) -> list[np.ndarray]:
    """One of each, some at once; number k has seed k."""
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(seed: int, prompt: str) -> np.ndarray:
        async with gate:
            return await make(model, prompt, seed, **more)

    return list(await asyncio.gather(*(one(seed, prompt) for seed, (_, prompt) in enumerate(asked))))


async def time_alone(make: Make, model: Reached, asked: Asked) -> float:
    """The median of the seconds that one takes when there is no other."""
    seconds = []
    for seed, (_, prompt) in enumerate(asked):
        begun = time.monotonic()
        await make(model, prompt, seed)
        seconds.append(time.monotonic() - begun)
    return round(statistics.median(seconds), 2)


def sum_up(right: Mapping[str, Sequence[bool]], faults: Counter[str]) -> dict[str, Any]:
    """The part that is right under each name, and how often each fault was found."""
    return {**{name: round(statistics.mean(each), 4) for name, each in right.items()}, "faults": dict(faults)}


def run(about: str | None, judge_at: Callable[[str, int, int], Awaitable[Mapping[str, Any]]], count: int) -> None:
    """The command line of a judge: prints what `judge_at` (where, count, seed) finds as one JSON object."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where")
    parser.add_argument("--count", type=int, default=count)
    parser.add_argument("--seed", type=int, default=7)
    told = parser.parse_args()

    async def judge() -> Mapping[str, Any]:
        return await judge_at(told.where, told.count, told.seed)

    print(json.dumps(asyncio.run(judge())))
