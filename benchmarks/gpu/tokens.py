"""The token runtime on a CUDA card: the workloads that peers are measured with, on random weights of real shapes.

A   256 requests at once, prompts and answers of 100 to 1024 tokens, temperature 0.6: output tokens per second
B   one request, 128 in and 512 out: decode tokens per second
C   64 requests that share 2,048 tokens and bring 64 of their own, 128 out: seconds

PYTHONPATH=benchmarks python benchmarks/gpu/tokens.py --shapes benchmarks/gpu/shapes.json --model qwen3-0.6b A B C
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path

import torch
from ledger import record
from shapes import build_model

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import accelerate
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.vocabulary import Failed, Submit, Tokens

PEER = "vLLM 0.26.0, best of its runs on the same kind of card"
PEER_FIGURES = {
    ("qwen3-0.6b", "A output tokens/s"): 23600.0,
    ("qwen3-0.6b", "B decode tokens/s"): 600.0,
    ("qwen3-0.6b", "C total s"): 0.62,
    ("qwen3-8b", "A output tokens/s"): 9280.0,
    ("qwen3-8b", "B decode tokens/s"): 193.0,
    ("qwen3-8b", "C total s"): 1.25,
}
"""Measured on another day with the same workloads; A's is its best of 22,400 to 23,600, B's of 475 to 600."""


def build_loop(model: torch.nn.Module, args: argparse.Namespace) -> Loop:
    decoder = accelerate(TransformersDecoder(model), positions=8192)
    settings = SiteSettings(max_rows=256, max_units=args.chunk, block=16, cache_bytes=args.cache << 30, slice_ms=50.0)
    site = Site(open_device("cuda"), settings, (TritonAttention(),))
    return Loop(site, {"m": GenerationProgram(TokenStage("decode", decoder, site), "m")})


def submit(loop: Loop, name: str, prompt: list[int], out: int, temperature: float) -> None:
    work = GenerateWork(
        prompts=[prompt], max_tokens=[out], seeds=[len(name)], sampling=Sampling(temperature=temperature)
    )
    loop.handle(Submit(name, "m", "complete", pack(work)))


def drain(loop: Loop) -> tuple[float, list[float], int]:
    """Seconds, the times of the steps that reported tokens, and how many tokens were reported."""
    start = time.perf_counter()
    times, tokens = [], 0
    while loop.jobs:
        loop.step()
        reports = loop.take_reports()
        found = sum(len(report.ids) for report in reports if isinstance(report, Tokens))
        for report in reports:
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
        if found:
            times.append(time.perf_counter())
            tokens += found
    torch.cuda.synchronize()
    loop.step()
    loop.check_integrity()
    return time.perf_counter() - start, times, tokens


def workload_a(loop: Loop) -> dict[str, float]:
    random.seed(0)
    prompts = [[random.randint(0, 10000) for _ in range(random.randint(100, 1024))] for _ in range(256)]
    outs = [random.randint(100, 1024) for _ in range(256)]
    for i, (prompt, out) in enumerate(zip(prompts, outs)):
        submit(loop, f"a{i}", prompt, out, 0.6)
    seconds, _, tokens = drain(loop)
    if tokens != sum(outs):
        raise RuntimeError(f"{sum(outs)} tokens were asked for, {tokens} came")
    return {"A output tokens/s": tokens / seconds}


def workload_b(loop: Loop) -> dict[str, float]:
    submit(loop, "b", [random.randint(0, 10000) for _ in range(128)], 512, 0.6)
    _, times, _ = drain(loop)
    return {"B decode tokens/s": (len(times) - 1) / (times[-1] - times[0])}


def workload_c(loop: Loop) -> dict[str, float]:
    shared = [random.randint(0, 10000) for _ in range(2048)]
    for i in range(64):
        submit(loop, f"c{i}", shared + [random.randint(0, 10000) for _ in range(64)], 128, 0.6)
    seconds, _, _ = drain(loop)
    return {"C total s": seconds}


WORKLOADS = {"A": workload_a, "B": workload_b, "C": workload_c}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workloads", nargs="+", choices=sorted(WORKLOADS))
    parser.add_argument("--shapes", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--cache", type=int, default=60, help="GiB")
    parser.add_argument("--chunk", type=int, default=4096, help="tokens of a launch")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    began = time.perf_counter()
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    loop = build_loop(build_model(json.loads(args.shapes.read_text())[args.model]), args)
    print(f"{args.model}: loaded in {time.perf_counter() - began:.1f} s", flush=True)
    results: dict[str, float] = {}
    for name in args.workloads:
        runs = [WORKLOADS[name](loop) for _ in range(args.runs + 1)][1:]  # the first warms up
        for metric in runs[0]:
            results[metric] = statistics.median(run[metric] for run in runs)
            print(f"{args.model} {metric}: {results[metric]:.2f}", flush=True)
    results["peak GiB"] = torch.cuda.max_memory_allocated() / 2**30
    if args.profile:
        with torch.profiler.profile() as profile:
            WORKLOADS[args.workloads[0]](loop)
        args.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total", row_limit=25))
    if args.out:
        for metric, value in results.items():
            peer_value = PEER_FIGURES.get((args.model, metric))
            record(
                "tokens",
                f"{args.model} shape, {metric.rsplit(' ', 1)[0]}",
                value,
                metric.rsplit(" ", 1)[1],
                peer=PEER if peer_value else None,
                peer_value=peer_value,
                hardware=torch.cuda.get_device_name(),
                results=args.out,
            )


if __name__ == "__main__":
    main()
