"""The online loads of gpu/online.py on a simulated card: what the plan's rule gives, without a card.

The lane and its learned costs are the real ones; a launch takes as long as a model fitted to what was measured on an
H200 with Qwen3-8B's shape. One run has the very arrivals of online.py, whose loads of the same length begin with the
same prompts (they are cached by then, for the peer too); the other has many arrivals of the same kind, all new.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/scheduling.py
"""

from __future__ import annotations

import argparse
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent / "gpu"))

from online import ANSWER, LOADS

from polymux.core.batch.tokens import TILE
from polymux.core.engine.defaults import ON_CUDA
from polymux.core.testing.simulated import QWEN3_8B_H200, Request, Served, percentile, simulate

BLOCK = 16

WARM = 64
"""Requests of the first prompts that online.py sends before it measures."""

HTTP = 3.0
"""Milliseconds that HTTP adds to a first token."""


def draw_arrivals(rate: float, prompt: int, count: int, *, ids: bool, known: int = 0) -> list[Request]:
    """As online.py draws them. `ids`: it draws token ids as well, from the same numbers. The first `known` prompts
    came before: all but what lies behind their last full block is cached."""
    draw = random.Random(0)
    requests, at = [], 0.0
    for _ in range(count):
        length = draw.randint(prompt // 2, prompt * 3 // 2)
        if ids:
            for _ in range(length):
                draw.randint(300, 20000)
        cached = (length - 1) // BLOCK * BLOCK if len(requests) < known else 0
        requests.append(Request(at, length, draw.randint(ANSWER // 2, ANSWER * 3 // 2), cached))
        at += 1e3 * draw.expovariate(rate)
    return requests


def describe(served: list[Served]) -> tuple[float, float, float, float]:
    """Milliseconds: first token p50 and p99, between tokens p50 and p99."""
    first = [each.first + HTTP for each in served]
    between = [gap for each in served for gap in each.between]
    return percentile(first, 0.5), percentile(first, 0.99), percentile(between, 0.5), percentile(between, 0.99)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slice", type=float, default=ON_CUDA["slice_ms"])
    parser.add_argument("--seconds", type=float, default=120.0, help="of arrivals in the long run")
    parser.add_argument("--recorded", type=int, default=QWEN3_8B_H200.recorded, help="tokens of the largest launch")
    args = parser.parse_args()
    card = replace(QWEN3_8B_H200, recorded=args.recorded)
    known = {512: WARM}
    print("load         first p50 / p99 (allowed)    between p50 / p99 (peer)   | the same, many arrivals")
    for (rate, prompt), (peer_first, peer_between) in LOADS.items():
        line = f"{rate:2}/s x {prompt:4}"
        for count, ids in ((int(rate * 8), True), (int(rate * args.seconds), False)):
            cached = known.get(prompt, 0) if ids else 0
            served = simulate(
                draw_arrivals(rate, prompt, count, ids=ids, known=cached),
                card,
                slice_ms=args.slice,
                max_rows=int(ON_CUDA["max_rows"]),
                max_units=int(ON_CUDA["max_units"]),
                grain=TILE,
            )
            first, first_99, between, between_99 = describe(served)
            line += (
                f"   {first:5.0f} / {first_99:4.0f} ({1.2 * peer_first:.0f})"
                f"   {between:4.1f} / {between_99:4.1f} ({peer_between:.0f})   |"
            )
        known[prompt] = max(known.get(prompt, 0), int(rate * 8))
        print(line, flush=True)


if __name__ == "__main__":
    main()
