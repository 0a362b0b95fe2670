"""The token runtime on a CUDA card: the workloads that peers are measured with, on random weights of real shapes.

A   256 requests at once, prompts and answers of 100 to 1024 tokens, temperature 0.6: output tokens per second.
    Then once more with the prompts in the prefix cache, which is another figure
B   one request, 128 in and 512 out: decode tokens per second
C   64 requests that share 2,048 tokens and bring 64 of their own, 128 out: seconds

No run finds the prompts of an earlier one in the prefix cache, unless it says so. Of each also: first token and gaps
between tokens (ms, p50 and p99), and how much of the time the card could not have done without (roofline.py). Prints
one table of all shapes at the end.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/tokens.py --models qwen3-0.6b qwen3-8b --out results.jsonl
With --tiny: small models of the same structure on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from gaps import STEPS, trace_steps
from ledger import record
from roofline import Work, floor_seconds, read_sizes
from shapes import build_model, shrink

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.attention import AttentionBackend
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.vocabulary import Failed, Submit, Tokens

PEER = "vLLM 0.26.0, best of its runs on the same kind of card"
PEER_FIGURES = {
    ("qwen3-0.6b", "A", "tokens/s"): 23600.0,
    ("qwen3-0.6b", "B", "tokens/s"): 600.0,
    ("qwen3-0.6b", "C", "s"): 0.62,
    ("qwen3-8b", "A", "tokens/s"): 9280.0,
    ("qwen3-8b", "B", "tokens/s"): 193.0,
    ("qwen3-8b", "C", "s"): 1.25,
}
"""Measured on another day with the same workloads; A's is its best of 22,400 to 23,600, B's of 475 to 600."""

MODELS = ("qwen3-0.6b", "qwen3-8b", "llama-3.1-8b", "gemma-3-4b-text", "qwen3-30b-a3b")

NAMES = {"A": ("A output", "tokens/s"), "B": ("B decode", "tokens/s"), "C": ("C total", "s")}


@dataclass
class Load:
    """Requests that are sent at once."""

    prompts: list[list[int]]
    outs: list[int]
    shared: int = 0
    """Leading tokens that all prompts have in common."""

    @property
    def work(self) -> Work:
        return Work([len(prompt) for prompt in self.prompts], self.outs, self.shared)


@dataclass
class Run:
    """What came of a load, in seconds since it was sent."""

    seconds: float = 0.0
    times: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    """Per request, when its tokens came."""

    @property
    def firsts(self) -> list[float]:
        return [times[0] for times in self.times.values()]

    @property
    def gaps(self) -> list[float]:
        return [b - a for times in self.times.values() for a, b in pairwise(times)]


def draw_load(name: str, vocabulary: int, scale: int) -> Load:
    """The lengths divided by `scale`."""
    draw = random.Random(list(NAMES).index(name))  # no two begin alike: the cache would give one what another computed
    top = min(10_000, vocabulary - 1)

    def ids(count: int) -> list[int]:
        return [draw.randint(0, top) for _ in range(max(count // scale, 1))]

    if name == "A":
        prompts = [ids(draw.randint(100, 1024)) for _ in range(256 // scale)]
        return Load(prompts, [max(draw.randint(100, 1024) // scale, 1) for _ in prompts])
    if name == "B":
        return Load([ids(128)], [512 // scale])
    shared = ids(2048)
    return Load([shared + ids(64) for _ in range(64 // scale)], [128 // scale] * (64 // scale), len(shared))


def list_backends(device: str) -> tuple[AttentionBackend, ...]:
    if device == "cpu":
        return ()
    from polymux.core.compute.triton.attention import TritonAttention

    return (TritonAttention(),)


def build_loop(model: torch.nn.Module, args: argparse.Namespace) -> Loop:
    device = "cpu" if args.tiny else "cuda"
    decoder = accelerate(TransformersDecoder(model), positions=None if args.tiny else 8192)
    if not isinstance(decoder, FastDecoder):
        raise RuntimeError("the model is not on the fast tier")
    cache = 1 << 26 if args.tiny else args.cache << 30
    settings = SiteSettings(max_rows=256, max_units=args.chunk, block=16, cache_bytes=cache, slice_ms=30.0)
    site = Site(open_device(device), settings, list_backends(device))
    stage = TokenStage("decode", decoder, site)
    loop = Loop(site, {"m": GenerationProgram(stage, "m")})
    began = time.perf_counter()
    stage.warm()
    warm = time.perf_counter() - began
    while stage.tend():
        pass
    print(f"warm in {warm:.1f} s, everything recorded in {time.perf_counter() - began:.1f} s", flush=True)
    return loop


def send(loop: Loop, load: Load) -> None:
    for number, (prompt, out) in enumerate(zip(load.prompts, load.outs)):
        work = GenerateWork(prompts=[prompt], max_tokens=[out], seeds=[number], sampling=Sampling(temperature=0.6))
        loop.handle(Submit(str(number), "m", "complete", pack(work)))


def run_load(loop: Loop, load: Load) -> Run:
    begin = time.perf_counter()
    send(loop, load)
    run = Run()
    while loop.jobs:
        loop.step()
        now = time.perf_counter() - begin
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            if isinstance(report, Tokens):
                run.times[report.job] += [now] * len(report.ids)
    run.seconds = time.perf_counter() - begin
    loop.step()
    loop.check_integrity()
    if [len(run.times[str(number)]) for number in range(len(load.outs))] != load.outs:
        raise RuntimeError("not every request got the tokens that it asked for")
    return run


def renew(load: Load, number: int, vocabulary: int) -> Load:
    """The same lengths and the same tokens in common, of other ids."""
    top = min(10_001, vocabulary)
    prompts = [[(id + number) % top for id in prompt] for prompt in load.prompts]
    return Load(prompts, load.outs, load.shared)


def measure(loop: Loop, name: str, loads: list[Load]) -> tuple[float, list[Run]]:
    """The workload's figure, the median of its runs after one to warm up, and the runs."""
    found = [run_load(loop, load) for load in loads][1:]
    outs = sum(loads[0].outs)
    values = {
        "A": lambda run: outs / run.seconds,
        "B": lambda run: len(run.gaps) / sum(run.gaps),
        "C": lambda run: run.seconds,
    }
    return statistics.median(map(values[name], found)), found


def percentile(values: list[float], share: float) -> float:
    """Milliseconds."""
    return 1e3 * sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else 0.0


def bench(model: str, args: argparse.Namespace) -> list[str]:
    """Lines of the table."""
    shape = json.loads(args.shapes.read_text())[model]
    built = build_model(shrink(shape), "cpu", torch.float32) if args.tiny else build_model(shape)
    sizes = read_sizes(built)
    began = time.perf_counter()
    loop = build_loop(built, args)
    print(f"{model}: ready in {time.perf_counter() - began:.1f} s", flush=True)
    hardware = "CPU" if args.tiny else torch.cuda.get_device_name()
    lines = []
    for name in args.workloads:
        load = draw_load(name, built.config.vocab_size, 16 if args.tiny else 1)
        loads = [renew(load, number, built.config.vocab_size) for number in range(args.runs + 1)]
        hits = loop.stats()["prefix_cache_hits_total"]
        value, runs = measure(loop, name, loads)
        if loop.stats()["prefix_cache_hits_total"] - hits > (args.runs + 1) * load.shared * len(load.prompts):
            raise RuntimeError("prompts of one run were cached from another")
        metric, unit = NAMES[name]
        floor = floor_seconds(sizes, load.work)
        share = 100 * floor / statistics.median(run.seconds for run in runs)
        firsts = [first for run in runs for first in run.firsts]
        gaps = [gap for run in runs for gap in run.gaps]
        peak = 0.0 if args.tiny else torch.cuda.max_memory_allocated() / 2**30
        peer = PEER_FIGURES.get((model, name, unit))
        first = f"{percentile(firsts, 0.5):.0f} / {percentile(firsts, 0.99):.0f}"
        gap = f"{percentile(gaps, 0.5):.2f} / {percentile(gaps, 0.99):.2f}"
        lines.append(
            f"| {model} | {metric} | {value:,.2f} {unit} | {peer or ''} | {share:.0f}% | {first} | {gap} | {peak:.1f} |"
        )
        print(lines[-1], flush=True)
        if args.table:
            with args.table.open("a") as file:
                file.write(lines[-1] + "\n")
        if args.out:
            tiny = " (tiny)" if args.tiny else ""
            figures = [(metric, value, unit), (f"{name} of the roofline", share, "%"), ("peak", peak, "GiB")]
            figures += [(f"{name} first token p99", percentile(firsts, 0.99), "ms")]
            figures += [(f"{name} between tokens p99", percentile(gaps, 0.99), "ms")]
            if name == "A":
                again = sum(load.outs) / run_load(loop, loads[-1]).seconds
                figures.append(("A output, prompts cached", again, "tokens/s"))
            for what, figure, its in figures:
                mine = what == metric and peer is not None and not args.tiny
                record(
                    "tokens", f"{model} shape, {what}{tiny}", figure, its, peer=PEER if mine else None,
                    peer_value=peer if mine else None, hardware=hardware, results=args.out,
                )  # fmt: skip
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
        for rows in (1, 64, 256):
            summary = {"model": model, "rows": rows, "hardware": hardware, **trace_decode(loop, rows)}
            print(json.dumps(summary), flush=True)
            with (args.trace / "gaps.jsonl").open("a") as file:
                file.write(json.dumps(summary) + "\n")
    return lines


def trace_decode(loop: Loop, rows: int) -> dict[str, Any]:
    """A trace of steps in which so many rows bring a token each."""
    send(loop, Load([[5, 6, 7, 8] * 8] * rows, [STEPS * 2] * rows))
    for _ in range(STEPS // 2):  # prompts, and the first steps
        loop.step()
        loop.take_reports()
    summary = trace_steps(loop.step)
    while loop.jobs:
        loop.step()
        loop.take_reports()
    return summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="*", default=[], help="A, B, C; all of them if none is named")
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", type=Path, help="where to add the table's lines as well")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--cache", type=int, default=60, help="GiB")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a launch")
    parser.add_argument("--trace", type=Path, help="a folder for what a trace of steady decode says")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.workloads = args.workloads or list(NAMES)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    lines = [
        "| shape | workload | ours | peer | of the roofline | first token p50 / p99 ms | between p50 / p99 ms | GiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    if args.table and not args.table.exists():
        args.table.write_text("\n".join(lines) + "\n")
    for model in args.models:
        lines += bench(model, args)
        gc.collect()
        if not args.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
    print("\n".join(lines), flush=True)


if __name__ == "__main__":
    main()
