"""A second question about the same picture, on the CPU: seconds to its answer, beside a question about a new one.

The model has random weights and a small decoder; the picture is large (1,024 patches of a 12-layer encoder).

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/vision.py
"""

from __future__ import annotations

import argparse
import statistics
from types import SimpleNamespace

import torch
from ledger import record
from vision_requests import Asker, build_loop, draw_file, run

LAYERS = {"num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
ROPE = {"rope_type": "default", "rope_theta": 5000000, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
SHAPE = {
    "class": "transformers.Qwen3VLForConditionalGeneration",
    "config": {
        "text_config": LAYERS
        | {"hidden_size": 256, "intermediate_size": 768, "vocab_size": 151936, "max_position_embeddings": 4096}
        | {"rope_parameters": ROPE},
        "vision_config": {
            "depth": 12,
            "hidden_size": 384,
            "intermediate_size": 1536,
            "num_heads": 6,
            "patch_size": 16,
            "out_hidden_size": 256,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [3, 6, 9],
        },
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    settings = SimpleNamespace(tiny=True, chunk=512, cache=1, slice=50.0, encoded=4096)
    loop, asker = build_loop(SHAPE, settings), Asker(1, text=16, out=4)
    seconds: dict[str, list[float]] = {"new": [], "again": []}
    for number in range(args.runs + 1):
        file = draw_file(number, 512)
        for metric, words in (("new", 0), ("again", 1000)):
            seconds[metric].append(run(loop, asker, [file], words, f"{metric} {number}")[0])
    new, again = (statistics.median(values[1:]) for values in seconds.values())
    print(f"new {new:.3f} s, again {again:.3f} s: {new / again:.1f} times faster")
    record(
        "vision",
        "a second question about a picture of 512x512 (16 tokens in, 4 out)",
        again,
        "s",
        peer="the same question about a new picture",
        peer_value=new,
    )


if __name__ == "__main__":
    main()
