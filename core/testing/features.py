"""The features of the language API, requests that together have every pair of them, and the table that says so.

python -m polymux.core.testing.features > docs/features.md
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

FEATURES: dict[str, tuple[Any, ...]] = {
    "stream": (False, True),
    "n": (1, 3),
    "tools": (None, "auto", "required"),
    "schema": (False, True),
    "reasoning": (None, 0, 8),
    "logprobs": (None, 0, 2),
    "stop": (False, True),
    "seed": (None, 5),
    "LoRA": (None, "calm", "loud"),
    "speculation": (False, True),
    "prefix cache": (False, True),
    "penalty": (False, True),
    "greedy": (False, True),
}
"""Feature -> its values, the first of which is without it. `reasoning` is a budget, `logprobs` how many others."""

Request = dict[str, Any]

OFFERED = 60
"""Requests drawn at random, of which the one that covers most is taken."""


def cover_pairs(features: dict[str, tuple[Any, ...]] = FEATURES) -> Iterator[Request]:
    """Requests, the same ones every time, that together have every pair of values of every two features."""
    random = Random(0)
    pairs = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(features, 2)
        for a in features[one]
        for b in features[two]
    }
    while pairs:
        drawn = [{name: random.choice(values) for name, values in features.items()} for _ in range(OFFERED)]
        best = max(drawn, key=lambda each: len(pairs & set(itertools.combinations(each.items(), 2))))
        pairs -= set(itertools.combinations(best.items(), 2))
        yield best


def has(request: Request, feature: str) -> bool:
    """Whether the request has the feature at all: anything but its first value."""
    return bool(request[feature] != FEATURES[feature][0])


def write_page(requests: Sequence[Request]) -> str:
    """docs/features.md: how many of the tested requests have both of two features."""
    names = list(FEATURES)
    lines = [
        "# Features, together",
        "",
        f"Every pair of values of every two features of the language API is tested together: {len(requests)} requests",
        "at once on one engine, on a tiny model and on `starter/chat`. Where a request has a seed, its answer must be",
        "the same streamed and whole, with and without speculation, from a cached prefix and not. The number says how",
        "many of the requests have both features.",
        "",
        "Made by `python -m polymux.core.testing.features`; `tests/modalities/llm/test_matrix.py` asks the requests,",
        "and fails when this page is stale.",
        "",
        "| | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for one in names:
        counts = [sum(has(each, one) and has(each, two) for each in requests) for two in names]
        lines.append(f"| **{one}** | " + " | ".join(map(str, counts)) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(write_page(list(cover_pairs())), end="")
