"""Speculation and adapters on a CUDA card, on random weights of real shapes.

S   one request, 128 in and 256 out, greedy: decode tokens per second without guesses, with prompt look-up, and with a
    draft model that is right always, or seven times of ten. What the models say is laid over their logits (a text that
    repeats itself), so acceptance is known; what they compute is not changed.
L   64 requests of 128 in and 128 out, without adapters and spread over eight of rank 16: output tokens per second.

PYTHONPATH=benchmarks python benchmarks/gpu/language.py --shapes benchmarks/gpu/shapes.json \
    --model qwen3-8b --draft qwen3-0.6b --out figures.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/language.py --tiny --out figures.jsonl
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from ledger import record
from parrot import PERIOD, Parrot
from shapes import build_model

from polymux.core.batch.adapters import AdapterStage, open_adapters
from polymux.core.batch.decoder import TokenModel
from polymux.core.batch.drafting import DraftModel
from polymux.core.batch.speculation import Drafter, LookupDrafter
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.adapters import AdapterSet
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.adapting import write_adapter
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.vocabulary import Failed, Submit, Tokens


def open_loop(model: TokenModel, args: argparse.Namespace, drafter: Callable[[Site], Drafter] | None = None) -> Loop:
    site = make_site(args)
    stage = TokenStage("decode", model, site, drafter=drafter(site) if drafter is not None else None)
    return Loop(site, {"m": GenerationProgram(stage, "m")})


def make_site(args: argparse.Namespace) -> Site:
    backends = ()
    if args.device.startswith("cuda"):
        from polymux.core.compute.triton.attention import TritonAttention

        backends = (TritonAttention(),)
    settings = SiteSettings(max_rows=64, max_units=2048, cache_bytes=int(args.cache * 2**30))
    return Site(open_device(args.device), settings, backends)


def run(loop: Loop, count: int, out: int, vocabulary: int, adapters: list[str | None]) -> tuple[float, float]:
    """Tokens per second over all requests, and the share of guesses that were right (0 without any)."""
    random.seed(0)
    for number in range(count):
        prompt = [random.randrange(vocabulary) for _ in range(104)] + [place % PERIOD + 5 for place in range(104, 128)]
        work = GenerateWork(
            prompts=[prompt],
            max_tokens=[out],
            seeds=[number],
            sampling=Sampling(temperature=0.0),
            adapter=adapters[number % len(adapters)],
        )
        loop.handle(Submit(f"{number}", "m", "complete", pack(work)))
    start, tokens, drafted, accepted = time.perf_counter(), 0, 0, 0
    while loop.jobs:
        for job in loop.jobs.values():
            receipt = job.receipt
        loop.step()
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            tokens += len(report.ids) if isinstance(report, Tokens) else 0
    seconds = time.perf_counter() - start
    drafted, accepted = receipt.guessed_units, receipt.accepted_units
    loop.step()
    loop.check_integrity()
    return tokens / seconds, accepted / drafted if drafted else 0.0


def measure(loop: Loop, args: argparse.Namespace, count: int, out: int, vocabulary: int, adapters: list[str | None]):
    """The better of two runs after one that warms up."""
    return max([run(loop, count, out, vocabulary, adapters) for _ in range(3)][1:])


def speculate(args: argparse.Namespace, target: TokenModel, draft: TokenModel) -> None:
    kinds: dict[str, Callable[[Site], Drafter] | None] = {
        "no guesses": None,
        "prompt look-up of 8": lambda site: LookupDrafter(8),
        "draft model of 4, always right": lambda site: DraftModel(Parrot(draft), site, 4),
        "draft model of 4, right 7 of 10": lambda site: DraftModel(Parrot(draft, 0.3), site, 4),
    }
    for kind, drafter in kinds.items():
        loop = open_loop(Parrot(target), args, drafter)
        speed, share = measure(loop, args, 1, args.out_tokens, target.shape.vocabulary, [None])
        note(args, f"{args.model} shape, one stream, {kind}", speed, "tokens/s")
        print(f"    guesses that were right: {share:.2f}", flush=True)
        del loop


def adapt(args: argparse.Namespace, model: torch.nn.Module) -> None:
    with tempfile.TemporaryDirectory() as folder:
        names = [f"a{i}" for i in range(8)]
        folders = {
            name: str(write_adapter(Path(folder) / name, model, rank=16, seed=i, strength=0.02))
            for i, name in enumerate(names)
        }
        reference = TransformersDecoder(model)
        served = AdapterSet(model, open_adapters(folders), reference.shape.dtype)
        decoder = accelerate(reference, positions=8192, adapters=served)
        site = make_site(args)
        stages = TokenStage("decode", decoder, site), AdapterStage(served, site)
        loop = Loop(site, {"m": GenerationProgram(stages[0], "m", adapters=stages[1])})
        for kind, adapters in {"no adapter": [None], "eight adapters of rank 16": names}.items():
            speed, _ = measure(loop, args, 64, args.out_tokens // 2, decoder.shape.vocabulary, adapters)
            note(args, f"{args.model} shape, 64 streams, {kind}", speed, "tokens/s")


def note(args: argparse.Namespace, workload: str, value: float, unit: str) -> None:
    print(f"{workload}: {value:.1f} {unit}", flush=True)
    if args.out:
        name = torch.cuda.get_device_name() if args.device.startswith("cuda") else "CPU"
        record("language", workload, value, unit, hardware=name, results=args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--draft", default="qwen3-0.6b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--out-tokens", type=int, default=256)
    parser.add_argument("--cache", type=float, default=20.0, help="GiB")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU: shows that the script runs")
    args = parser.parse_args()
    if args.tiny:
        args.device, args.model, args.out_tokens, args.cache = "cpu", "tiny", 32, 0.125
        models = [build(tiny_llama), build(lambda: tiny_llama())]
    else:
        shapes = json.loads(args.shapes.read_text())
        models = [build_model(shapes[name]) for name in (args.model, args.draft)]
    target, draft = (accelerate(TransformersDecoder(model), positions=8192) for model in models)
    speculate(args, target, draft)
    del target, draft
    adapt(args, models[0])


if __name__ == "__main__":
    main()
