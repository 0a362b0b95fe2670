"""What the host spends on the token workloads of gpu/tokens.py: the real loop around a model that does nothing.

On a card the host must be through with a step before the device is, and whatever comes before the first launch, or
between a prompt's last and the first that reads it, is waited for. Times are of this process alone (`process_time`), so
a busy machine disturbs them little; a recorded step is stood in for by its input.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/host.py A C
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
from tokens import draw_load, send

from polymux.core.batch.decoder import TokenBatch, TokenModel, TokenShape
from polymux.core.batch.plan import Plan
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram

VOCABULARY = 64
PAGES = 2048
"""Superpages, as many as 60 GiB have."""


class Nothing(TokenModel):
    shape = TokenShape(1, 1, 2, VOCABULARY, 1 << 15, torch.float32)

    def forward(self, batch: TokenBatch) -> torch.Tensor:
        return torch.zeros(len(batch.sampled), VOCABULARY)


class Replays:
    """In place of recorded steps."""

    def __init__(self, most: int) -> None:
        self._input = torch.zeros(2 * most + 1, dtype=torch.int64)

    def run(self, slots: list[int], positions: list[int], shared: int, rules: Any = ()) -> tuple[torch.Tensor, ...]:
        numbers = [shared, *slots, *positions]
        self._input[: len(numbers)].copy_(torch.tensor(numbers, dtype=torch.int64))
        rows = len(slots)
        return torch.zeros(rows, 1), torch.ones(rows, dtype=torch.int64), torch.ones(rows, dtype=torch.bool)

    def record_more(self) -> bool:
        return False


@dataclass
class Launched:
    """A step, in milliseconds: when its launch was out, counted from the first request, and what it took in all."""

    rows: int
    units: int
    out: float
    took: float


def run(name: str) -> list[Launched]:
    settings = SiteSettings(max_rows=256, max_units=4096, cache_bytes=PAGES << 14, superpage=1 << 14, slice_ms=30.0)
    site = Site(LaggedCpu(), settings)
    stage = TokenStage("decode", Nothing(), site)
    stage._graphs = Replays(settings.max_rows)  # type: ignore[assignment]
    loop = Loop(site, {"m": GenerationProgram(stage, "m")})
    found: list[Launched] = []
    launch = stage.launch

    def watch(plan: Plan) -> Any:
        ticket = launch(plan)
        found.append(Launched(len(plan.grants), plan.units, 1e3 * (time.process_time() - began), 0.0))
        return ticket

    stage.launch = watch  # type: ignore[method-assign]
    load = draw_load(name, VOCABULARY, 1)
    began = time.process_time()
    send(loop, load)
    while loop.jobs:
        begin, known = time.process_time(), len(found)
        loop.step()
        loop.take_reports()
        for each in found[known:]:
            each.took = 1e3 * (time.process_time() - begin)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=["A", "C"])
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    for name in args.workloads:
        found = run(name)
        total = sum(each.took for each in found)
        outs = ", ".join(f"{each.out:.1f}" for each in found[:3])
        print(f"{name}: {total:.0f} ms in {len(found)} launches; the first three were out at {outs} ms")
        kinds = {"with prompts": [each for each in found if each.units > 1024]}
        for low, high in ((256, 256), (128, 255), (32, 127), (1, 31)):
            kinds[f"{low} to {high} rows"] = [each for each in found if low <= each.rows == each.units <= high]
        for kind, steps in kinds.items():
            if steps:
                print(f"   {kind}: {len(steps)} steps, median {statistics.median(each.took for each in steps):.2f} ms")


if __name__ == "__main__":
    main()
