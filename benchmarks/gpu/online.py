"""Streams that arrive by chance, over HTTP through the gateway, and the time from process start to the first token.

A folder with random weights of the shape is written to the local disk and served by `polymux serve` in a process of
its own; prompts are token ids, so that lengths are exact. Arrivals are Poisson and open-loop, lengths uniform between
half and one and a half times their mean; the load and the peer's figures are those of vLLM 0.26.0's own server on the
same kind of card, measured on another day, and the arrivals are the very same. At each rate but the first of a length,
the first half of the prompts have been seen at the rate before, as they had been by the peer.

With --starts 2 the server is started twice: without compiled kernels, then with those of the first time.
--starts-only ends there.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/online.py --model qwen3-8b --out FILE
With --tiny: a small model of the same structure on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from ledger import record
from serving import Server, post, serve

PEER = "vLLM 0.26.0 server, same kind of card"
LOADS = {  # (arrivals a second, mean prompt): the peer's p99 of first token and between tokens, ms
    (8, 512): (41.0, 14.0),
    (16, 512): (110.0, 37.0),
    (32, 512): (153.0, 50.0),
    (48, 512): (184.0, 63.0),
    (8, 2400): (177.0, 48.0),
    (16, 2400): (307.0, 117.0),
}
ANSWER = 128

TINY_LOADS = {(8, 24): (41.0, 14.0)}


@dataclass
class Stream:
    """Times of one request, in seconds since it was sent."""

    asked: int
    tokens: list[float] = field(default_factory=list)


async def complete(port: int, prompt: list[int], tokens: int) -> Stream:
    body = json.dumps(
        {"model": "m", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, "ignore_eos": True}
    ).encode()
    stream = Stream(tokens)
    begin = time.perf_counter()
    reader, writer = await post(port, "/v1/completions", body)
    async for line in reader:
        if line.startswith(b"data: {"):
            if b'"text":""' not in line and b'"choices":[]' not in line:
                stream.tokens.append(time.perf_counter() - begin)
        elif line.startswith(b"data: [DONE]"):
            break
        elif line.startswith(b"event: error"):
            raise RuntimeError((await reader.readline()).decode())
    writer.close()
    return stream


async def load(
    port: int, rate: float, prompt: int, count: int, words: int = 20_000, answer: int = ANSWER
) -> tuple[list[Stream], float]:
    """Streams of `count` requests, with token ids up to `words`; and how long it took.

    Lengths, ids and arrivals are drawn in the order in which they were when the peer was measured: both see the same
    bursts. What is a request's own comes from its number alone: a rate's first requests are those of the rate before.
    """
    clock = random.Random(0)
    tasks = []
    begin = time.perf_counter()
    for _ in range(count):
        draw = random.Random(clock.random())
        length, asked = draw.randint(prompt // 2, prompt * 3 // 2), draw.randint(answer // 2, answer * 3 // 2)
        ids = [draw.randint(min(10, words - 20), words) for _ in range(length)]
        tasks.append(asyncio.create_task(complete(port, ids, asked)))
        await asyncio.sleep(clock.expovariate(rate))
    return await asyncio.gather(*tasks), time.perf_counter() - begin


def percentile(values: list[float], share: float) -> float:
    """Milliseconds."""
    return 1000 * sorted(values)[min(len(values) - 1, int(share * len(values)))]


def report_start(server: Server, args: argparse.Namespace, which: str) -> None:
    """The stages of the start, and the first token."""
    asyncio.run(complete(server.port, [300] * 64, 1))
    first = time.perf_counter() - server.began
    print(
        f"listening {server.listening:.1f} s, ready {server.ready:.1f} s, first token {first:.1f} s; {server.facts}",
        flush=True,
    )
    if args.out:
        stages = {"gateway listening": server.listening, "engine ready": server.ready, "first token": first}
        named = {f"start to {stage}": seconds for stage, seconds in stages.items()}
        parts = server.facts["facts"].get("start_seconds", {})
        named |= {f"of its start, {name}": seconds for name, seconds in parts.items()}
        for name, seconds in named.items():
            what = f"{args.model} shape, {name}{which}"
            record("online", what, seconds, "s", results=args.out, hardware=args.hardware)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--model", required=True)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=8.0, help="of arrivals at every rate")
    parser.add_argument("--starts", type=int, default=1)
    parser.add_argument("--starts-only", action="store_true", help="no arrivals")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--log", type=int, default=2000, help="characters of the server's log to show at the end")
    args = parser.parse_args()
    from shape import write_shape  # after the arguments: they bring torch
    from shapes import shrink

    loads = TINY_LOADS if args.tiny else LOADS
    words, answer, warm, device = (310, 8, 8, "cpu") if args.tiny else (20_000, ANSWER, 64, "cuda")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        os.environ["TRITON_CACHE_DIR"] = f"{scratch}/kernels"
        begin = time.perf_counter()
        shape = json.loads(args.shapes.read_text())[args.model]
        write_shape(shrink(shape) if args.tiny else shape, folder, device)
        args.hardware = release()
        print(f"wrote the weights in {time.perf_counter() - begin:.1f} s", flush=True)
        if args.starts_only:
            show_imports(folder)
        for start in range(args.starts):
            with serve(folder, device, "float32" if args.tiny else "bfloat16", shown=args.log) as server:
                report_start(server, args, ", kernels compiled before" if start else "")
                if args.starts_only or start < args.starts - 1:
                    continue
                asyncio.run(load(server.port, 8, 16 if args.tiny else 512, warm, words, answer))
                for (rate, prompt), (peer_first, peer_between) in loads.items():
                    count = int(rate * (2.0 if args.tiny else args.seconds))
                    streams, seconds = asyncio.run(load(server.port, rate, prompt, count, words, answer))
                    report(args, rate, prompt, streams, seconds, peer_first, peer_between)


def show_imports(folder: Path) -> None:
    """What takes long where the model's code is imported (-X importtime)."""
    found = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", "import polymux.core.generation.program"],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    ).stderr
    lines = [line.removeprefix("import time:").split("|") for line in found.splitlines() if "|" in line]
    for own, whole, name in lines[1:]:
        if int(whole) > 100_000:
            print(f"{int(whole) / 1e6:7.2f} s, own {int(own) / 1e6:5.2f} s {name}")


def report(
    args: argparse.Namespace,
    rate: int,
    prompt: int,
    streams: list[Stream],
    seconds: float,
    peer_first: float,
    peer_between: float,
) -> None:
    short = [stream for stream in streams if len(stream.tokens) != stream.asked]
    first = [stream.tokens[0] for stream in streams]
    between = [b - a for stream in streams for a, b in zip(stream.tokens, stream.tokens[1:])]
    p50, p90, p99 = (percentile(between, share) for share in (0.5, 0.9, 0.99))
    print(
        f"{rate}/s x {prompt}: first token {percentile(first, 0.5):.0f} / {percentile(first, 0.9):.0f} / "
        f"{percentile(first, 0.99):.0f} ms (peer p99 {peer_first:.0f}), between {p50:.1f} / {p90:.1f} / {p99:.1f} "
        f"(max {1000 * max(between):.0f}) ms (peer p99 {peer_between:.0f}), "
        f"{sum(len(stream.tokens) for stream in streams) / seconds:.0f} tokens/s, "
        f"{len(short)} streams with merged tokens",
        flush=True,
    )
    if args.out:
        name = f"{args.model} shape, {rate}/s x {prompt} tokens"
        for what, value, peer in (
            ("first token p99", percentile(first, 0.99), peer_first),
            ("between tokens p99", p99, peer_between),
        ):
            record(
                "online",
                f"{name}, {what}",
                value,
                "ms",
                peer=PEER,
                peer_value=peer,
                hardware=args.hardware,
                results=args.out,
            )


def release() -> str:
    """Give the card back before the server starts; its name."""
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


if __name__ == "__main__":
    main()
