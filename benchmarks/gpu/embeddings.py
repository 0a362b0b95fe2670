"""Embeddings end to end on a CUDA card: texts in, vectors out, through the front, the loop and the presenter.

2,048 texts of 8 to 256 random words (a word is a token), in requests of 64: tokens and texts per second, special
tokens not counted. Tokenising runs on threads beside the loop. Then one text of 64 tokens alone: milliseconds.

PYTHONPATH=benchmarks python benchmarks/gpu/embeddings.py --model minilm-l6 --out results.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/embeddings.py --model qwen3-embedding-0.6b --out results.jsonl
With --tiny: a small model of the same structure on the CPU, to see that it runs.
With --host: a model that does nothing, texts as long as ever: what the host spends on each text, part by part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from ledger import record
from shapes import build_model
from torch import Tensor

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.compute.attention import AttentionBackend, PackedContext
from polymux.core.compute.body import Body, TransformersBody
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.device import open_device
from polymux.core.compute.load import prepare_body
from polymux.core.compute.packed import PACKED_BACKENDS
from polymux.core.compute.packed.choice import MeasuredAttention
from polymux.core.compute.packed.table import Table
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.pipeline import Prepared, Presenter
from polymux.core.tasks import Embed, Vector
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Failed, Submit
from polymux.modalities.llm.embedder import TextEmbedder
from polymux.modalities.llm.embedding import EmbedFront
from polymux.modalities.llm.program import EmbeddingProgram

PEER = "vLLM 0.26.0, best of its runs on the same kind of card"
PEER_FIGURES = {
    ("minilm-l6", "tokens/s"): 524_000.0,
    ("minilm-l6", "texts/s"): 3_900.0,
    ("minilm-l6", "ms"): 5.5,
    ("qwen3-embedding-0.6b", "tokens/s"): 211_000.0,
    ("qwen3-embedding-0.6b", "texts/s"): 1_580.0,
    ("qwen3-embedding-0.6b", "ms"): 11.7,
}
"""Measured on another day with the same workload, beside other work."""

POOLINGS = {"minilm-l6": "mean", "qwen3-embedding-0.6b": "last"}

TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}

LONGEST = 512

SPECIAL = ["[UNK]", "[CLS]", "[SEP]"]


def build_tokenizer(vocabulary: int) -> Tokenizer:
    """A tokenizer of BERT's kind whose words are made up: no file of a real one is needed, the work is the same."""
    letters = random.Random(0)
    words: dict[str, int] = {token: i for i, token in enumerate(SPECIAL)}
    while len(words) < vocabulary:
        words.setdefault("".join(letters.choices("abcdefghijklmnopqrstuvwxyz", k=letters.randint(3, 8))), len(words))
    backend = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    backend.normalizer = tokenizers.normalizers.BertNormalizer()
    backend.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    backend.post_processor = tokenizers.processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return Tokenizer(backend)


def draw_texts(tokenizer: Tokenizer, count: int, lengths: tuple[int, int]) -> list[list[str]]:
    """Per text its words, each one token."""
    draw = random.Random(1)
    words = [tokenizer.name(i) for i in range(len(SPECIAL), tokenizer.size)]
    return [draw.choices(words, k=draw.randint(*lengths)) for _ in range(count)]


def list_backends(device: str) -> tuple[AttentionBackend, ...]:
    """What core registers, without the plugin machinery."""
    if device == "cpu":
        return (NativeAttention(),)
    from polymux.core.compute.triton.attention import TritonAttention

    return (TritonAttention(), *PACKED_BACKENDS)


class Bench:
    """One model behind its front, and a loop that is stepped here."""

    def __init__(self, args: argparse.Namespace) -> None:
        shape = json.loads(args.shapes.read_text())[args.model]
        if args.tiny:
            shape["config"] |= TINY | {key: 2 for key in shape["config"] if key == "num_key_value_heads"}
        device = "cpu" if args.tiny else "cuda"
        model = build_model(shape, device, torch.float32 if args.tiny else torch.bfloat16)
        site = Site(open_device(device), SiteSettings(cache_bytes=1 << 26), list_backends(device))
        body = prepare_body(model)
        if isinstance(body, TransformersBody):
            raise RuntimeError(f"{args.model} is not on the fast tier")
        embedder = self.embedder = TextEmbedder(body, site, POOLINGS[args.model])
        config = body.config
        dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.attention = site.packed_attention(body.dtype, dim)
        stage = OneShotStage("embed", embedder, site, max_units=args.units, to_host=True)
        self.loop = Loop(site, {"m": EmbeddingProgram(stage, embedder)})
        self.tokenizer = build_tokenizer(min(30_522, shape["config"]["vocab_size"]))
        self.front = EmbedFront(self.tokenizer, LONGEST, self.tokenizer.size, embedder.dimensions)
        self.threads = ThreadPoolExecutor(args.threads, "preparers")
        self.on_card = not args.tiny

    def embed(self, requests: Sequence[list[str]]) -> list[np.ndarray]:
        """The vectors of all requests, (texts, dimensions) each."""
        waiting = [self.threads.submit(self._prepare, inputs) for inputs in requests]
        presenters: dict[str, Presenter] = {}
        found: list[list[np.ndarray]] = [[] for _ in requests]
        submitted = 0
        while submitted < len(waiting) or self.loop.jobs:
            while submitted < len(waiting) and (waiting[submitted].done() or not self.loop.jobs):
                presenters[str(submitted)] = self._submit(str(submitted), waiting[submitted])
                submitted += 1
            self.loop.step()
            for report in self.loop.take_reports():
                if isinstance(report, Failed):
                    raise RuntimeError(report.error)
                for answer in presenters[report.job].feed(report):
                    if isinstance(answer, Vector):
                        found[int(report.job)].append(np.frombuffer(answer.data, "<f4"))
        self.loop.step()
        self.loop.check_integrity()
        return [np.stack(vectors) for vectors in found]

    def _prepare(self, inputs: list[str]) -> tuple[Embed, Prepared, Any]:
        ask = Embed(inputs=inputs)
        prepared = self.front.prepare("embed", ask)
        return ask, prepared, pack(prepared.work)

    def _submit(self, name: str, work: Future[tuple[Embed, Prepared, Any]]) -> Presenter:
        ask, prepared, body = work.result()
        self.loop.handle(Submit(name, "m", "embed", body))
        return self.front.present("embed", ask, prepared)


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, float]:
    lengths = (8, 24) if args.tiny else (8, 256)
    words = draw_texts(bench.tokenizer, 96 if args.tiny else 2048, lengths)
    texts = [" ".join(each) for each in words]
    requests = [texts[i : i + args.request] for i in range(0, len(texts), args.request)]
    seconds = []
    for _ in range(args.runs + 2):  # the first two warm up
        began = time.perf_counter()
        vectors = np.concatenate(bench.embed(requests))
        seconds.append(time.perf_counter() - began)
        if vectors.shape[0] != len(texts) or abs(np.linalg.norm(vectors, axis=1) - 1.0).max() > 1e-2:
            raise RuntimeError("not every text has a vector of unit length")
    alone = np.concatenate(bench.embed([[text] for text in texts[:8]]))
    if (alone * vectors[:8]).sum(axis=1).min() < 0.999:
        raise RuntimeError("a text alone has another vector than among others")
    one = [" ".join(words[0][:1] * 64)]
    waits = []
    for _ in range(30):
        began = time.perf_counter()
        bench.embed([one])
        waits.append((time.perf_counter() - began) * 1e3)
    median = statistics.median(seconds[2:])
    return {
        "tokens/s": sum(map(len, words)) / median,
        "texts/s": len(texts) / median,
        "ms": statistics.median(waits[5:]),
    }


class Nothing(Body):
    """Computes nothing, at once."""

    def __init__(self, body: Body) -> None:
        self.config, self.dtype = body.config, body.dtype

    def run(self, ids: Tensor, places: Tensor, segments: Tensor | None, context: PackedContext) -> Tensor:
        return torch.ones(1, self.config.hidden_size).expand(len(ids), -1)


def measure_host(bench: Bench, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds a text, the best of some runs: tokenising and packing, the engine, telling, and all of it."""
    words = draw_texts(bench.tokenizer, 512, (8, 256))
    texts = [" ".join(each) for each in words]
    requests = [texts[i : i + args.request] for i in range(0, len(texts), args.request)]
    prepared: list[tuple[Embed, Prepared, Any]] = []
    reports: list[Any] = []

    def prepare() -> None:
        prepared[:] = [bench._prepare(each) for each in requests]

    def engine() -> None:
        reports.clear()
        for number, (_, _, body) in enumerate(prepared):
            bench.loop.handle(Submit(str(number), "m", "embed", body))
        while bench.loop.jobs:
            bench.loop.step()
            reports.extend(bench.loop.take_reports())
        bench.loop.step()

    def tell() -> None:
        presenters = [bench.front.present("embed", ask, work) for ask, work, _ in prepared]
        for report in reports:
            presenters[int(report.job)].feed(report)

    steps = {"preparing": prepare, "the engine": engine, "telling": tell, "all": lambda: bench.embed(requests)}
    found = {}
    for name, step in steps.items():
        times = []
        for _ in range(args.runs + 1):
            began = time.perf_counter()
            step()
            times.append(time.perf_counter() - began)
        found[name] = min(times[1:]) / len(texts) * 1e6
    return found


NAMES = {"tokens/s": "texts in, vectors out", "texts/s": "texts in, vectors out", "ms": "one text of 64 tokens"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(POOLINGS), required=True)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--units", type=int, default=16384, help="tokens of a launch")
    parser.add_argument("--request", type=int, default=64, help="texts of a request")
    parser.add_argument("--threads", type=int, default=max(1, min(14, (os.cpu_count() or 1) - 2)), help="tokenisers")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    args.tiny = args.tiny or args.host
    bench = Bench(args)
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)
    if args.host:
        bench.embedder.body = Nothing(bench.embedder.body)
        bench.embedder.poolings = [lambda hidden, texts: hidden[: len(texts.starts) - 1]]
        for part, spent in measure_host(bench, args).items():
            print(
                json.dumps({"metric": f"host, a text of 129 tokens, {part}", "value": spent, "unit": "us"}), flush=True
            )
            if args.out:
                record("embeddings_host", f"a text of 129 tokens, {part}", spent, "us", results=args.out)
        return
    results = measure(bench, args)
    attention = bench.attention
    if isinstance(attention, MeasuredAttention):
        print("\n".join(Table(attention.table.device).lines()), flush=True)
    hardware = torch.cuda.get_device_name() if bench.on_card else None
    for unit, value in results.items():
        name = f"{args.model} shape, {NAMES[unit]}{' (tiny)' if args.tiny else ''}"
        print(json.dumps({"metric": name, "value": value, "unit": unit}), flush=True)
        peer_value = None if args.tiny else PEER_FIGURES[args.model, unit]
        if args.out:
            record(
                "embeddings", name, value, unit, peer=None if args.tiny else PEER, peer_value=peer_value,
                hardware=hardware, results=args.out,
            )  # fmt: skip
    if args.profile:
        with torch.profiler.profile() as profile:
            measure(bench, args)
        args.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30))


if __name__ == "__main__":
    main()
