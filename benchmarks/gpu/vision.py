"""Pictures on a CUDA card: 64 requests at once, each with a picture of its own, on random weights of a real shape.

new     distinct pictures of 1024 x 1024, 64 tokens of text, 64 out: seconds from the files' bytes to the last token
again   the same pictures with other words
one     one request alone with a new picture

The pictures are JPEG files; reading, resizing and hashing them is within the time, on threads beside the loop.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/vision.py --out results.jsonl
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import queue
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ledger import record
from PIL import Image
from shapes import build_model

from polymux.core.batch.encode import EncodeStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.errors import Overloaded
from polymux.core.pictures import read_picture
from polymux.core.tasks import Sampling
from polymux.core.vocabulary import Failed, Submit, Tokens
from polymux.modalities.vision.cut import PatchCutter
from polymux.modalities.vision.positions import Grid, place_tokens
from polymux.modalities.vision.program import ENCODED, LookProgram
from polymux.modalities.vision.split import split_model
from polymux.modalities.vision.work import Item, LookWork, Picture

PEER = "vLLM 0.26.0, best of its runs on the same kind of card"
PEER_SECONDS = {"new": 3.9, "again": 1.5, "one": 0.25}
"""Measured on another day with the same workload, from pictures that were decoded already."""

PROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
TINY = {
    "class": "transformers.Qwen3VLForConditionalGeneration",
    "config": {
        "text_config": {
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4,
            "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 151936, "max_position_embeddings": 4096,
            "rope_parameters": {"rope_type": "default", "rope_theta": 5000000, "mrope_section": [4, 2, 2],
                                "mrope_interleaved": True},
        },
        "vision_config": {
            "depth": 4, "hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "patch_size": 16,
            "out_hidden_size": 64, "num_position_embeddings": 2304, "deepstack_visual_indexes": [0, 1, 2],
        },
    },
}  # fmt: skip


class Asker:
    """Makes requests on threads: a file's bytes become work, and the work a command."""

    def __init__(self, threads: int, text: int, out: int) -> None:
        self.cutter = PatchCutter(PROCESSOR, {}, "<image>", "<video>", timed=True, speed=2.0)
        self.threads = ThreadPoolExecutor(threads)
        self.ready: queue.SimpleQueue[Submit | BaseException] = queue.SimpleQueue()
        self.text = text
        self.out = out

    def ask(self, name: str, file: bytes, words: int) -> None:
        self.threads.submit(self._prepare, name, file, words)

    def _prepare(self, name: str, file: bytes, words: int) -> None:
        try:
            work = self._write(file, random.Random(words))
            while True:
                try:
                    self.ready.put(Submit(name, "m", "chat", pack(work)))
                    return
                except Overloaded:  # what was lent before is read first
                    time.sleep(0.001)
        except BaseException as error:
            self.ready.put(error)

    def _write(self, file: bytes, words: random.Random) -> LookWork:
        """The picture between its two marks, then words."""
        (piece,) = self.cutter.cut(read_picture(file, "picture"), "auto", alone=True).pieces
        count = piece.counts[0]
        prompt = [151652, *[151655] * count, 151653, *[words.randrange(10_000) for _ in range(self.text)]]
        assert piece.grid is not None
        return LookWork(
            prompts=[prompt],
            max_tokens=[self.out],
            seeds=[0],
            sampling=Sampling(temperature=0.0),
            pictures=[Picture([Item(piece.pixels, piece.digest, [1], [count])])],
            positions=place_tokens(len(prompt), [Grid(1, *piece.grid)]),
        )


def draw_file(seed: int, side: int) -> bytes:
    """A JPEG file of a picture like a photograph's: soft shapes under a little noise."""
    generator = np.random.default_rng(seed)
    soft = Image.fromarray(generator.integers(0, 256, (16, 16, 3), np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(soft).astype(np.int16) + generator.integers(-8, 9, (side, side, 1))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def build_loop(shape: dict[str, Any], args: argparse.Namespace) -> Loop:
    device = open_device("cpu" if args.tiny else "cuda")
    model = build_model(shape, device.torch.type, torch.float32 if args.tiny else torch.bfloat16)
    encoder, reference = split_model(model, PROCESSOR, device)
    decoder = accelerate(reference, positions=4096)
    if not isinstance(decoder, FastDecoder):
        raise RuntimeError("the decoder is not on the fast tier")
    backends: tuple[Any, ...] = ()
    if not args.tiny:
        from polymux.core.compute.triton.attention import TritonAttention

        backends = (TritonAttention(),)
    cache = (1 << 28) if args.tiny else (args.cache << 30)
    settings = SiteSettings(max_rows=128, max_units=args.chunk, block=16, cache_bytes=cache, slice_ms=args.slice)
    site = Site(device, settings, backends)
    encode = EncodeStage("encode", encoder, site, max_units=args.encoded // encoder.inlay.shape[0])
    return Loop(site, {"m": LookProgram(encode, encoder, TokenStage("decode", decoder, site), "m", site)})


def run(loop: Loop, asker: Asker, files: list[bytes], words: int, name: str) -> tuple[float, float]:
    """Seconds from the first file to the last token, and the mean to a request's first token."""
    began = time.perf_counter()
    for number, file in enumerate(files):
        asker.ask(f"{name} {number}", file, words + number)
    submitted = 0
    tokens = 0
    first: dict[str, float] = {}
    while submitted < len(files) or loop.jobs:
        while submitted < len(files):
            try:
                made = asker.ready.get(block=not loop.jobs, timeout=None)
            except queue.Empty:
                break
            if isinstance(made, BaseException):
                raise made
            loop.handle(made)
            submitted += 1
        loop.step()
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            if isinstance(report, Tokens):
                tokens += len(report.ids)
                first.setdefault(report.job, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    if tokens != len(files) * asker.out:
        raise RuntimeError(f"{tokens} tokens of {len(files) * asker.out}")
    while loop.step():
        pass
    return seconds, statistics.mean(first.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--threads", type=int, default=14)
    parser.add_argument("--cache", type=int, default=60, help="GiB")
    parser.add_argument("--chunk", type=int, default=8192, help="tokens of a launch of the decoder")
    parser.add_argument("--encoded", type=int, default=ENCODED, help="vectors of a launch of the encoder")
    parser.add_argument("--slice", type=float, default=50.0, help="milliseconds of a launch while others wait")
    parser.add_argument("--tiny", action="store_true", help="a small model on the CPU, to try the script")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.requests, args.runs, args.threads, args.chunk = 3, 1, 2, 512
    side, text, out = (128, 8, 4) if args.tiny else (1024, 64, 64)
    shape = TINY if args.tiny else json.loads(args.shapes.read_text())["qwen3-vl-2b"]
    loop, asker = build_loop(shape, args), Asker(args.threads, text, out)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    files = [draw_file(seed, side) for seed in range((args.runs + 1) * (args.requests + 1))]
    seconds: dict[str, list[float]] = {"new": [], "again": [], "one": []}
    for number in range(args.runs + 1):
        mine = [files.pop() for _ in range(args.requests)]
        for metric, chosen, words in (("new", mine, 0), ("again", mine, 10_000), ("one", [files.pop()], 20_000)):
            found, first = run(loop, asker, chosen, words, f"{metric} {number}")
            seconds[metric].append(found)
            print(f"{metric} {number}: {found:.3f} s, first token after {first:.3f} s", flush=True)
    if args.profile:
        with torch.profiler.profile() as profile:
            run(loop, asker, [draw_file(10_000 + seed, side) for seed in range(args.requests)], 0, "profiled")
        args.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total", row_limit=40))
    told = {
        "new": f"{args.requests} new pictures at once",
        "again": f"the same {args.requests} pictures, other words",
        "one": "one new picture alone",
    }
    for metric, values in seconds.items():
        value = statistics.median(values[1:])  # the first warms up
        print(json.dumps({"metric": metric, "seconds": value, "runs": values}), flush=True)
        if args.out:
            record(
                "vision",
                f"Qwen3-VL-2B shape, {told[metric]} (1024x1024, 64 tokens in and out)",
                value,
                "s",
                peer=PEER,
                peer_value=PEER_SECONDS[metric],
                hardware=None if args.tiny else torch.cuda.get_device_name(),
                results=args.out,
            )


if __name__ == "__main__":
    main()
