"""Where the time of a step of single tokens goes: microseconds of each kind of kernel, by the number of rows.

Rows have prompts of their own (`own`) or one in common of which each has the last 64 tokens for itself (`shared`).
`step_us` is a step's time in a run of them, `kernels_us` what the kernels of one have together: what lies between is
launching, and what the host adds.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/decode.py --model qwen3-8b --out decode.jsonl [--tiny]
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from mixed import finish, name_kind
from shapes import build_model, shrink
from tokens import Load, build_loop, send

from polymux.core.compute.graphs import PATIENCE
from polymux.core.engine.loop import Loop
from polymux.core.vocabulary import Tokens

STEPS = 16
COMMON = 2048


def draw_load(rows: int, prompt: int, common: int) -> Load:
    draw = random.Random(rows * 7 + prompt + common)
    shared = [draw.randint(0, 200) for _ in range(common)]
    prompts = [shared + [draw.randint(0, 200) for _ in range(prompt)] for _ in range(rows)]
    return Load(prompts, [8 * STEPS] * rows, common)


def run_steps(loop: Loop, steps: int) -> float:
    """Microseconds a step."""
    began = time.perf_counter()
    for _ in range(steps):
        loop.step()
        loop.take_reports()
    return 1e6 * (time.perf_counter() - began) / steps


def profile_steps(loop: Loop, tiny: bool) -> dict[str, list[float]]:
    """By kernel: microseconds a step, and how often it ran in one."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU] if tiny else [activity.CPU, activity.CUDA]) as profile:
        for _ in range(STEPS):
            loop.step()
            loop.take_reports()
        finish(tiny)
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in profile.key_averages():
        if not tiny and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # the operators that launched them
        took = event.self_cpu_time_total if tiny else event.self_device_time_total
        spent[event.key][0] += took / STEPS
        spent[event.key][1] += event.count / STEPS
    return spent


def measure(loop: Loop, rows: int, prompt: int, common: int, tiny: bool) -> dict[str, Any]:
    send(loop, draw_load(rows, prompt, common))
    speaking: set[str] = set()
    while len(speaking) < rows:
        loop.step()
        speaking |= {report.job for report in loop.take_reports() if isinstance(report, Tokens)}
    run_steps(loop, PATIENCE + 1)  # then what such a load wants is recorded
    finish(tiny)
    step_us = run_steps(loop, STEPS)
    spent = profile_steps(loop, tiny)
    while loop.jobs:
        loop.step()
        loop.take_reports()
    kinds: dict[str, float] = defaultdict(float)
    for name, (took, _) in spent.items():
        kinds[name_kind(name) or "other"] += took
    longest = sorted(spent.items(), key=lambda item: -item[1][0])[:14]
    return {
        "step_us": round(step_us, 1),
        "kernels_us": round(sum(took for took, _ in spent.values()), 1),
        "kernels": round(sum(count for _, count in spent.values()), 1),
        "kinds_us": {kind: round(took, 1) for kind, took in sorted(kinds.items(), key=lambda item: -item[1])},
        "longest_us": {name[:70]: [round(took, 1), round(count, 1)] for name, (took, count) in longest},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 64, 128, 256])
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--cache", type=int, default=60, help="GiB")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a launch")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    shape = json.loads(args.shapes.read_text())[args.model]
    model = build_model(shrink(shape), "cpu", torch.float32) if args.tiny else build_model(shape)
    loop = build_loop(model, args)
    cases = [(rows, 20 if args.tiny else 512, 0) for rows in args.rows]
    cases += [(64, 8 if args.tiny else 64, 32 if args.tiny else COMMON)]
    for rows, prompt, common in cases:
        found = measure(loop, rows, prompt, common, args.tiny)
        line = json.dumps({"model": args.model, "rows": rows, "own": prompt, "shared": common, **found})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")


if __name__ == "__main__":
    main()
