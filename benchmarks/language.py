"""The language starters on a CPU against transformers and sentence-transformers, in one run; figures are ratios.

decode    64 tokens in, 64 out: the first token's time apart, tokens after it over their time
prefix    a second request that shares a 1,000-token prefix: how much sooner its first token comes
quality   divergence of the served number format from fp32 over 20 greedy continuations
embed     512 mixed texts in one list, and 64 clients with one text each

python benchmarks/language.py --record decode prefix quality embed
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable

import torch
from ledger import record

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.load import load_decoder
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.models import resolve
from polymux.core.plugins import load_plugins
from polymux.core.tasks import Embed, Sampling
from polymux.core.vocabulary import NamedModel, Submit, Tokens

WORDS = [
    "river",
    "stone",
    "market",
    "winter",
    "engine",
    "letter",
    "garden",
    "silver",
    "window",
    "music",
    "paper",
    "forest",
    "doctor",
    "bridge",
    "yellow",
    "captain",
    "morning",
    "history",
    "orange",
    "number",
    "kitchen",
    "science",
    "summer",
    "village",
    "travel",
    "pencil",
    "camera",
    "basket",
    "thunder",
    "planet",
]


def find_starter(name: str) -> NamedModel:
    return next(model for model in load_plugins().named_models() if model.name == name)


class Decoding:
    """The chat starter in a loop of its own."""

    def __init__(self, options: dict) -> None:
        self.files = resolve(find_starter("starter/chat").reference)
        decoder = load_decoder(
            self.files.folder, torch.device("cpu"), torch.float32, quantization=options.get("quantization")
        )
        self.model = decoder
        backends = tuple(load_plugins().attention_backends())
        site = Site(settings=SiteSettings(deterministic=True), attention_backends=backends)
        self.loop = Loop(site, {"m": GenerationProgram(TokenStage("decode", decoder, site), "m")})

    def run(self, prompts: list[list[int]], out: int) -> tuple[float, float]:
        """Seconds to the first token, and tokens per second after each row's first."""
        for i, prompt in enumerate(prompts):
            work = GenerateWork(
                prompts=[prompt],
                max_tokens=[out],
                seeds=[0],
                sampling=Sampling(temperature=0.0),
                salt=str(random.random()),
            )
            self.loop.handle(Submit(str(i), "m", "complete", pack(work)))
        return self.drain(len(prompts))

    def drain(self, rows: int) -> tuple[float, float]:
        start = time.perf_counter()
        first: dict[str, float] = {}
        count = 0
        while self.loop.jobs:
            self.loop.step()
            now = time.perf_counter()
            for report in self.loop.take_reports():
                if isinstance(report, Tokens):
                    count += 1
                    first.setdefault(report.job, now)
        begun = max(first.values())
        return min(first.values()) - start, (count - rows) / (time.perf_counter() - begun) if count > rows else 0.0


def random_prompts(count: int, length: int, seed: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(100, 40000) for _ in range(length)] for _ in range(count)]


def measure_decode(rounds: int) -> None:
    from transformers import AutoModelForCausalLM

    ours = Decoding(find_starter("starter/chat").options)
    peer = AutoModelForCausalLM.from_pretrained(ours.files.folder, dtype=torch.float32).eval()

    def generate(prompts: list[list[int]]) -> float:
        ids = torch.tensor(prompts)
        mask = torch.ones_like(ids)
        times = {}
        for tokens in (1, 64):
            start = time.perf_counter()
            with torch.inference_mode():
                peer.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False, eos_token_id=None)
            times[tokens] = time.perf_counter() - start
        return 63 * len(prompts) / (times[64] - times[1])

    ones, theirs, sixteens, statics = [], [], [], []
    for round_ in range(rounds):
        prompts = random_prompts(16, 64, round_)
        ones.append(ours.run(prompts[:1], 64)[1])
        theirs.append(generate(prompts[:1]))
        sixteens.append(ours.run(prompts, 64)[1])
        statics.append(generate(prompts))
    one, their, sixteen, static = map(statistics.median, (ones, theirs, sixteens, statics))
    report("decode, 1 request", one, "tokens/s", "transformers generate fp32", their)
    report("decode, 16 requests at once", sixteen, "tokens/s", "transformers generate fp32, static batch of 16", static)
    report("decode, 16 requests at once", sixteen, "tokens/s", "transformers generate fp32, one by one", their)


def measure_prefix(rounds: int) -> None:
    ours = Decoding(find_starter("starter/chat").options)
    firsts, seconds = [], []
    for round_ in range(rounds):
        shared = random_prompts(1, 1000, 100 + round_)[0]
        for times, tail in ((firsts, [5, 6, 7]), (seconds, [8, 9, 10])):
            work = GenerateWork(
                prompts=[shared + tail], max_tokens=[2], seeds=[0], sampling=Sampling(temperature=0.0)
            )  # fmt: skip
            ours.loop.handle(Submit("p", "m", "complete", pack(work)))
            times.append(ours.drain(1)[0])
    report(
        "first token of a request sharing 1,000 tokens", statistics.median(seconds), "s",
        "the first request with that prefix", statistics.median(firsts),
    )  # fmt: skip


def measure_quality(count: int = 20, length: int = 64) -> None:
    """Teacher-forced over the fp32 model's own greedy text."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    served = Decoding(find_starter("starter/chat").options)
    exact = AutoModelForCausalLM.from_pretrained(served.files.folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(served.files.folder)
    divergences, agreed = [], []
    for i in range(count):
        prompt = tokenizer(f"Tell me something about the {WORDS[i]} and the {WORDS[-i - 1]}.").input_ids
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            ids = exact.generate(ids, max_new_tokens=length, do_sample=False)
            truth = exact(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found = score(served, ids[0].tolist())[len(prompt) - 1 : -1].log_softmax(-1)
        divergences += (truth.exp() * (truth - found)).sum(-1).tolist()
        agreed += (truth.argmax(-1) == found.argmax(-1)).tolist()
    ordered = sorted(divergences)
    report("KL of the served format against fp32, mean", statistics.mean(divergences), "nats")
    report("KL of the served format against fp32, p99", ordered[int(0.99 * len(ordered))], "nats")
    report("top-1 agreement of the served format with fp32", statistics.mean(agreed), "share")


def score(served: Decoding, ids: list[int]) -> torch.Tensor:
    """Logits of the served model at every place."""
    from polymux.core.batch.tokens import TokenBatch
    from polymux.core.compute.attention import PackedContext
    from polymux.core.compute.sdpa import SdpaAttention

    places = torch.arange(len(ids))
    with torch.inference_mode():
        return served.model.forward(
            TokenBatch(torch.tensor(ids), places, places, places, PackedContext(SdpaAttention(), [0, len(ids)]))
        )


def random_texts(count: int, seed: int, least: int = 4, most: int = 200) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(least, most))) for _ in range(count)]


def measure_embed(rounds: int) -> None:
    from sentence_transformers import SentenceTransformer

    from polymux.modalities.llm.plugin import TextEmbedding

    starter = find_starter("starter/embed")
    files = resolve(starter.reference)
    pipeline, site = TextEmbedding(), Site()
    front = pipeline.front(files, starter.options)
    loop = Loop(site, {"m": pipeline.load(files, site, starter.options)})
    peer = SentenceTransformer(str(files.folder), device="cpu")

    def ours(asks: list[list[str]]) -> float:
        start = time.perf_counter()
        for i, texts in enumerate(asks):
            loop.handle(
                Submit(str(i), "m", "embed", pack(front.prepare("embed", Embed(inputs=texts, truncate=True)).work))
            )
        while loop.jobs:
            loop.step()
            loop.take_reports()
        return sum(map(len, asks)) / (time.perf_counter() - start)

    def theirs(asks: list[list[str]]) -> float:
        start = time.perf_counter()
        for texts in asks:
            peer.encode(texts, show_progress_bar=False)
        return sum(map(len, asks)) / (time.perf_counter() - start)

    def compare(metric: str, make: Callable[[int], list[list[str]]], name: str) -> None:
        pairs = [(ours(make(i)), theirs(make(i))) for i in range(rounds)]
        ours_median, theirs_median = (statistics.median(column) for column in zip(*pairs))
        report(metric, ours_median, "texts/s", name, theirs_median)

    ours([random_texts(8, 999)])
    theirs([random_texts(8, 999)])
    compare("embed, one list of 512 mixed texts", lambda i: [random_texts(512, i)], "sentence-transformers")
    compare(
        "embed, 64 clients with one text each", lambda i: [[text] for text in random_texts(64, 50 + i, 4, 40)],
        "sentence-transformers, one by one",
    )  # fmt: skip


RECORDING = False


def report(metric: str, value: float, unit: str, peer: str | None = None, peer_value: float | None = None) -> None:
    against = "" if peer_value is None else f"   {peer}: {peer_value:.3f}   ratio {value / peer_value:.2f}"
    print(f"{metric}: {value:.4f} {unit}{against}", flush=True)
    if RECORDING:
        record("language", metric, value, unit, peer=peer, peer_value=peer_value)


def main() -> None:
    global RECORDING
    measures = {"decode": measure_decode, "prefix": measure_prefix, "embed": measure_embed}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=[*measures, "quality"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true", help="append to results/RESULTS.jsonl")
    arguments = parser.parse_args()
    RECORDING = arguments.record
    for name in arguments.what:
        if name == "quality":
            measure_quality()
        else:
            measures[name](arguments.rounds)


if __name__ == "__main__":
    main()
