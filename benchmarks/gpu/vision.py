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
import json
import statistics
from pathlib import Path

import torch
from ledger import record
from vision_requests import Asker, build_loop, draw_file, run

from polymux.modalities.vision.program import ENCODED

PEER = "vLLM 0.26.0, best of its runs on the same kind of card"
PEER_SECONDS = {"new": 3.9, "again": 1.5, "one": 0.25}
"""Measured on another day with the same workload, from pictures that were decoded already."""

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
