"""Embeddings through `polymux serve`: texts in, base64 vectors out, over HTTP; gateway and engine in their processes.

The texts of embeddings.py, in requests of 64, so many requests on their way at a time: tokens and texts per second,
special tokens not counted, and the CPU seconds that both processes spent for each text.

PYTHONPATH=benchmarks python benchmarks/gpu/embeddings_http.py --model minilm-l6 --out results.jsonl
With --tiny: a small model of the same structure on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from embeddings import PEER, PEER_FIGURES, POOLINGS, TINY, build_tokenizer, draw_texts
from ledger import record
from serving import post, serve
from shapes import build_model

MODULES = "sentence_transformers.models"


def write_model(args: argparse.Namespace, folder: Path) -> str:
    """The folder of the shape with random weights, as sentence-transformers lays it out; the name of the card."""
    shape = json.loads(args.shapes.read_text())[args.model]
    if args.tiny:
        shape["config"] |= TINY | {key: 2 for key in shape["config"] if key == "num_key_value_heads"}
    device = "cpu" if args.tiny else "cuda"
    model = build_model(shape, device, torch.float32 if args.tiny else torch.bfloat16)
    model.config.architectures = [type(model).__name__]
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(build_tokenizer(min(30_522, shape["config"]["vocab_size"])).definition)
    kinds = {"mean": "mean_tokens", "last": "lasttoken"}
    width = shape["config"]["hidden_size"]
    pooling = {"word_embedding_dimension": width, f"pooling_mode_{kinds[POOLINGS[args.model]]}": True}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    parts = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize")]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"{MODULES}.{kind}"} for i, (path, kind) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    del model
    gc.collect()
    torch.cuda.empty_cache()
    return "CPU" if args.tiny else torch.cuda.get_device_name()


async def embed(port: int, body: bytes) -> bytes:
    reader, writer = await post(port, "/v1/embeddings", body)
    answer = await reader.read()
    writer.close()
    return answer


async def embed_all(port: int, bodies: list[bytes], together: int) -> list[bytes]:
    """Every request's answer, `together` on their way at a time."""
    places = asyncio.Semaphore(together)

    async def one(body: bytes) -> bytes:
        async with places:
            return await embed(port, body)

    return await asyncio.gather(*map(one, bodies))


def check(answers: list[bytes], texts: int) -> None:
    """Raises unless every text has a vector of unit length."""
    items = [item for answer in answers for item in json.loads(answer)["data"]]
    vectors = np.stack([np.frombuffer(base64.b64decode(item["embedding"]), "<f4") for item in items])
    if len(vectors) != texts or abs(np.linalg.norm(vectors, axis=1) - 1.0).max() > 1e-2:
        raise RuntimeError("not every text has a vector of unit length")


def spent() -> float:
    """CPU seconds that our child processes and theirs have used so far."""
    parents, used = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            parents[int(stat.parent.name)] = int(fields[1])
            used[int(stat.parent.name)] = int(fields[11]) + int(fields[12])
    family: set[int] = set()
    for _ in range(4):
        family |= {pid for pid, parent in parents.items() if parent in family | {os.getpid()}}
    return sum(used[pid] for pid in family) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(POOLINGS), required=True)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=4)
    parser.add_argument("--texts", type=int, default=8192, help="of a run")
    parser.add_argument("--request", type=int, default=64, help="texts of a request")
    parser.add_argument("--together", type=int, default=16, help="requests on their way")
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    count = 128 if args.tiny else args.texts
    tokenizer = build_tokenizer(30_522)
    words = draw_texts(tokenizer, count, (8, 24) if args.tiny else (8, 256))
    texts = [" ".join(each) for each in words]
    bodies = [
        json.dumps({"model": "m", "input": texts[i : i + args.request], "encoding_format": "base64"}).encode()
        for i in range(0, count, args.request)
    ]
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "model"
        hardware = write_model(args, folder)
        device, dtype = ("cpu", "float32") if args.tiny else ("cuda", "bfloat16")
        with serve(folder, device, dtype, engine={"cache_bytes": 1 << 26}) as server:
            seconds = []
            for _ in range(args.runs + 2):  # the first two warm up
                used, began = spent(), time.perf_counter()
                answers = asyncio.run(embed_all(server.port, bodies, args.together))
                seconds.append(time.perf_counter() - began)
                used = spent() - used
                check(answers, count)
            waits = []
            one = json.dumps({"model": "m", "input": " ".join(words[0][:1] * 64), "encoding_format": "base64"}).encode()
            for _ in range(30):
                began = time.perf_counter()
                asyncio.run(embed(server.port, one))
                waits.append((time.perf_counter() - began) * 1e3)
    median = statistics.median(seconds[2:])
    figures = {
        "tokens/s": sum(map(len, words)) / median,
        "texts/s": count / median,
        "ms": statistics.median(waits[5:]),
        "CPU us a text": used / count * 1e6,
    }
    for unit, value in figures.items():
        what = "one text of 64 tokens" if unit == "ms" else "texts in, vectors out"
        name = f"{args.model} shape, over HTTP, {what}{' (tiny)' if args.tiny else ''}"
        print(json.dumps({"metric": name, "value": value, "unit": unit}), flush=True)
        peer_value = None if args.tiny else PEER_FIGURES.get((args.model, unit))
        if args.out:
            peer = f"{PEER}, without HTTP" if peer_value else None
            record(
                "embeddings", name, value, unit, peer=peer, peer_value=peer_value, hardware=hardware, results=args.out
            )


if __name__ == "__main__":
    main()
