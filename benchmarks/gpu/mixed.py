"""What a launch with pieces of prompts costs, by its size: where the time of a prompt's token goes.

For each number of tokens, alone and beside streams that bring one token each: milliseconds on the card, those that the
host takes to launch it, microseconds a token; and the same of the recorded launch that a server would use. Then, for
some sizes, the share of each kind of kernel. Products are made in tiles: sizes just above a multiple of a tile, or
whose last tiles leave most of the card idle, cost as much as the next that fills it.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/mixed.py --model qwen3-8b --out mixed.jsonl
With --tiny: a small model of the same structure on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from shapes import build_model, shrink
from tokens import list_backends

from polymux.core.batch.frame import list_frames
from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.sequence import TokenRequest, TokenRow, token_row
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import accelerate
from polymux.core.engine.job import Job, JobHost
from polymux.core.engine.site import Site, SiteSettings

STREAMS = 32
PROFILED = (512, 2048)
REPEATS = 4

KINDS = {
    "attention": ("_attend", "_read", "_join"),
    "rotary and writing": ("_rotate",),
    "norms": ("_add_norm", "norm"),
    "gates": ("_gate", "silu", "gelu"),
    "products": ("gemm", "nvjet", "cutlass", "_multiply", "addmm", "::mm", "linear"),
    "draws": ("_draw", "softmax", "sort"),
}


def name_kind(kernel: str) -> str | None:
    return next((kind for kind, parts in KINDS.items() if any(part in kernel.lower() for part in parts)), None)


def build(shape: dict[str, Any], tiny: bool) -> TokenStage:
    device = "cpu" if tiny else "cuda"
    model = build_model(shrink(shape), "cpu", torch.float32) if tiny else build_model(shape)
    decoder = accelerate(TransformersDecoder(model), positions=None if tiny else 8192)
    settings = SiteSettings(max_rows=256, max_units=4096, cache_bytes=1 << 26 if tiny else 8 << 30)
    site = Site(open_device(device), settings, list_backends(device))
    return TokenStage("decode", decoder, site)


def finish(tiny: bool) -> None:
    if not tiny:
        torch.cuda.synchronize()


def clock(launch: Callable[[], Any], tiny: bool) -> tuple[float, float]:
    """Milliseconds of one launch of several in a row, and of the host until it has launched one."""
    launch()
    finish(tiny)
    began = time.perf_counter()
    for _ in range(REPEATS):
        launch()
    launched = time.perf_counter() - began
    finish(tiny)
    return 1e3 * (time.perf_counter() - began) / REPEATS, 1e3 * launched / REPEATS


def share_out(launch: Callable[[], Any], tiny: bool) -> dict[str, float]:
    """Milliseconds of one launch by kind of kernel; what is of no known kind is named."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CPU] if tiny else [activity.CPU, activity.CUDA]) as profile:
        launch()
        finish(tiny)
    spent: dict[str, float] = defaultdict(float)
    for event in profile.key_averages():
        if not tiny and event.device_type != torch.autograd.DeviceType.CUDA:
            continue  # the operators that launched them
        took = event.self_cpu_time_total if tiny else event.self_device_time_total
        if took:
            spent[name_kind(event.key) or event.key[:60]] += took / 1e3
    return dict(sorted(spent.items(), key=lambda item: -item[1])[:12])


def record(stage: TokenStage, tell: Callable[[dict[str, Any]], None]) -> None:
    """All frames, and what that takes: first those before a server's first request, then the others."""
    if stage._mixed is None:
        return
    stage.rehearse()
    torch.cuda.synchronize()
    before, began = torch.cuda.memory_reserved(), time.perf_counter()
    stage._mixed.record_few()
    few = time.perf_counter() - began
    while stage._mixed.record_more():
        pass
    torch.cuda.synchronize()
    tell(
        {
            "frames": sum(map(len, list_frames(stage.max_units, stage.max_rows))),
            "recorded_first_s": few,
            "recorded_s": time.perf_counter() - began,
            "reserved_mb": (torch.cuda.memory_reserved() - before) / 1e6,
        }
    )


def lay_out(stage: TokenStage, tokens: int, streams: int) -> Plan:
    """A prompt beside streams, with blocks of their own."""
    host = JobHost(lambda stage, row: None, lambda stage, row: None)
    vocabulary, block = stage.model.shape.vocabulary, stage.cache.units
    grants, used = [], 0
    for slot, count in enumerate([1] * streams + [tokens - streams]):
        prompt = [(7 * place + slot) % vocabulary for place in range(count)]
        row = TokenRow(Job(host, str(slot), "chat"), TokenRequest(prompt, 2))
        row.slot, row.blocks = slot, list(range(used, used + -(-count // block)))
        used += len(row.blocks)
        grants.append(Grant(row, 0, count))
    stage._packer.extend_tables([token_row(grant.row) for grant in grants])
    return Plan("decode", grants)


def replay(stage: TokenStage, tokens: int, streams: int) -> dict[str, Callable[[], Any]]:
    """The recorded launch of a plan, and how far its logits are from those of kernels that are launched one by one;
    nothing where it goes out that way anyhow."""
    plan = lay_out(stage, tokens, streams)
    graphs = stage._mixed
    frame = None if graphs is None else graphs.choose(plan)
    if graphs is None or frame is None:
        return {}

    def differ() -> float:
        expected = stage.model.forward(stage._packer.pack(plan)).float()
        found, *_ = graphs.run(frame, stage._packer.send_frame(frame, plan))
        return ((found[: len(plan.grants)].float() - expected).abs().max() / expected.abs().max()).item()

    return {"launch": lambda: stage._replay_mixed(plan, frame, graphs), "differ": differ}


def tell_recorded(replayed: dict[str, Callable[[], Any]], tiny: bool) -> dict[str, float]:
    took, host = clock(replayed["launch"], tiny)
    return {"recorded_ms": took, "recorded_host_ms": host, "recorded_difference": replayed["differ"]()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="qwen3-8b")
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    stage = build(json.loads(args.shapes.read_text())[args.model], args.tiny)
    model, packer = stage.model, stage._packer

    def tell(found: dict[str, Any]) -> None:
        line = json.dumps({"model": args.model, **found})
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    def prepare(tokens: int, streams: int) -> Callable[[], Any]:
        batch = packer.pack_idle([1] * streams + [tokens - streams])
        return lambda: model.forward(batch)

    sizes = [64, 200] if args.tiny else [64, *range(128, 1025, 128), 1536, 2048, 4096]
    with torch.inference_mode():
        record(stage, tell)
        for tokens in sizes:
            for streams in (0, STREAMS):
                took, host = clock(prepare(tokens, streams), args.tiny)
                replayed = replay(stage, tokens, streams)
                tell(
                    {
                        "tokens": tokens,
                        "streams": streams,
                        "ms": took,
                        "host_ms": host,
                        "us_a_token": 1e3 * took / tokens,
                        **(tell_recorded(replayed, args.tiny) if replayed else {}),
                    }
                )
        for tokens in sizes[:1] if args.tiny else PROFILED:
            tell({"tokens": tokens, "streams": STREAMS, "ms_by_kind": share_out(prepare(tokens, STREAMS), args.tiny)})


if __name__ == "__main__":
    main()
