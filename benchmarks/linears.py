"""Milliseconds that the linear layers of a small language model take, int8 against float32, in one run.

    python benchmarks/linears.py [--threads N] [--repeats N] [--rows 1 16 1000] [--record]

The shapes are SmolLM2-135M's: 30 layers of merged query-key-value, output, merged gate-up and down projections, and
the head. Weights are random: time does not depend on them. Up to 16 rows are a decode step, all of which pass the head;
more are a prompt, of which the last does. Ways take turns within a repeat: other work on the machine meets them alike.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ledger import RESULTS, record
from torch import Tensor
from torch.nn.functional import linear

from polymux.core.compute.int8 import Int8Linear

LAYERS = 30
LAYER = [(960, 576), (576, 576), (3072, 576), (576, 1536)]
HEAD = (49152, 576)
DECODE_ROWS = 16

PEER = "torch float32"

Product = Callable[[Tensor], Tensor]


def build_ways() -> dict[str, list[Product]]:
    """The products of one step, the head last, by the name of the way they are computed."""
    weights = [torch.randn(shape) * 0.05 for _ in range(LAYERS) for shape in LAYER] + [torch.randn(HEAD) * 0.05]
    halves = [weight.bfloat16() for weight in weights]
    return {
        PEER: [lambda x, weight=weight: linear(x, weight) for weight in weights],
        "torch bfloat16": [lambda x, half=half: linear(x.bfloat16(), half).float() for half in halves],
        "int8, torch operator": [Int8Linear(weight, native=False) for weight in weights],
        "int8, compiled kernel": [Int8Linear(weight) for weight in weights],
    }


def time_step(products: list[Product], rows: int) -> float:
    """Milliseconds of one step over `rows` rows."""
    inputs = {size: torch.randn(rows, size) for _, size in LAYER}
    sizes = [size for _ in range(LAYERS) for _, size in LAYER]
    last = inputs[HEAD[1]] if rows <= DECODE_ROWS else inputs[HEAD[1]][-1:]
    started = time.perf_counter()
    for product, size in zip(products[:-1], sizes, strict=True):
        product(inputs[size])
    products[-1](last)
    return (time.perf_counter() - started) * 1e3


def measure(ways: dict[str, list[Product]], rows: int, repeats: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats + 1):
        for name, products in ways.items():
            elapsed = time_step(products, rows)
            if repeat > 0:  # the first warms up
                times[name].append(elapsed)
    return times


def describe_hardware(threads: int) -> str:
    model = platform.processor() or platform.machine()
    if (info := Path("/proc/cpuinfo")).exists():
        model = next((line.split(":")[1].strip() for line in info.open() if line.startswith("model name")), model)
    return f"{model}, {os.cpu_count()} cores, {torch.backends.cpu.get_cpu_capability()}, {threads} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16, 64, 256, 1000])
    parser.add_argument("--record", action="store_true", help=f"append to {RESULTS.name}")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print(describe_hardware(arguments.threads))
    print("| rows | way | median ms | least ms | times faster than float32 |\n|--:|---|--:|--:|--:|")
    with torch.inference_mode():
        ways = build_ways()
        for rows in arguments.rows:
            times = measure(ways, rows, arguments.repeats if rows <= DECODE_ROWS else min(arguments.repeats, 3))
            peer = statistics.median(times[PEER])
            for name, values in times.items():
                median = statistics.median(values)
                print(f"| {rows} | {name} | {median:.1f} | {min(values):.1f} | {peer / median:.2f} |", flush=True)
            if arguments.record:
                for name in times.keys() - {PEER}:
                    record(
                        "linears",
                        f"{name}, {rows} rows",
                        statistics.median(times[name]),
                        "ms/step",
                        peer=PEER,
                        peer_value=peer,
                        hardware=describe_hardware(arguments.threads),
                    )


if __name__ == "__main__":
    main()
