"""Parity on a CUDA card: what the runtime generates against transformers, over tiers, attention backends, chunk sizes,
block sizes and recorded steps.

    fp32   greedy tokens equal transformers' own, every one
    bf16   the logprob of every generated token is as near to what transformers gives in fp32 for the same sequence and
           the same rounded weights as transformers in bf16 is: at most `TIMES` its own worst difference and `LOGPROB`
    packed attention inside rows: every backend that does not refuse, against the reference in fp32

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/check.py --out check.jsonl
With --tiny: fewer cases, on the CPU. Exits with 1 when anything is out of bounds.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows, explain_refusal
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.packed import PACKED_BACKENDS
from polymux.core.compute.packed.probe import try_packed
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import DECODERS, build

TIMES, LOGPROB = 2.0, 0.05
"""Nats: a token's logprob in bfloat16 may differ from that in float32 by so many times what transformers' own does at
worst, and so much more. In a mixture of experts one rounding sends a token to another expert, for both."""

PACKED = 2e-2
"""Of a packed attention's output in bfloat16, relative to its norm."""

ANSWER = 24

Make = Callable[[], torch.nn.Module]


def tiny_moe() -> torch.nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def paged_backends(device: str) -> dict[str, tuple[AttentionBackend, ...]]:
    """Those that read blocks: our kernels, and the reference."""
    if device == "cpu":
        return {"sdpa": ()}
    from polymux.core.compute.triton.attention import TritonAttention

    return {"triton": (TritonAttention(),), "sdpa": ()}


def generate(
    model: torch.nn.Module,
    dtype: torch.dtype,
    backends: tuple[AttentionBackend, ...],
    case: dict[str, Any],
    device: str,
) -> tuple[list[list[int]], Driver]:
    """Prompts of many lengths, two of them with a common start; twice as many as have room at once."""
    decoder: Any = TransformersDecoder(model.to(device, dtype))
    if case["tier"] == "fast":
        decoder = accelerate(decoder)
        if not isinstance(decoder, FastDecoder):
            raise RuntimeError(f"{case['model']} is not on the fast tier")
    settings = SiteSettings(
        max_rows=case["rows"],
        max_units=case["chunk"],
        block=case["block"],
        cache_bytes=case["cache"],
        superpage=1 << 14,
    )
    site = Site(open_device(device), settings, backends)
    stage = TokenStage("d", decoder, site)
    if case["warm"]:
        stage.warm()
        while stage.tend():
            pass
    driver = Driver(Loop(site, {"m": GenerationProgram(stage, "m")}))
    draw = random.Random(0)
    prompts = [[draw.randrange(3, 97) for _ in range(draw.randrange(1, 60))] for _ in range(2 * case["rows"] + 2)]
    prompts[1] = prompts[0] + prompts[1][:5]
    for i, prompt in enumerate(prompts):
        work = GenerateWork(
            prompts=[prompt], max_tokens=[ANSWER], seeds=[0], sampling=Sampling(temperature=0.0),
            logprobs=1 if i % 2 or dtype != torch.float32 else None,
        )  # fmt: skip
        driver.submit(str(i), "m", "complete", work)
    driver.finish()
    return prompts, driver


def check_tokens(model: torch.nn.Module, prompts: list[list[int]], driver: Driver, device: str) -> int:
    """How many answers are not transformers' own."""
    wrong = 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device=device)
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=ANSWER, do_sample=False, eos_token_id=None
        )
        wrong += expected[0, len(prompt) :].tolist() != driver.tokens(str(i))
    return wrong


@torch.inference_mode()
def check_logprobs(
    model: torch.nn.Module, prompts: list[list[int]], driver: Driver, device: str
) -> tuple[float, float]:
    """The largest difference of a generated token's logprob from `model` in float32: ours, and that of `model`."""
    exact = copy.deepcopy(model).float()
    ours = theirs = 0.0
    for i, prompt in enumerate(prompts):
        tokens, told = driver.tokens(str(i)), driver.logprobs(str(i))
        ids = torch.tensor([[*prompt, *tokens]], device=device)
        chosen = torch.tensor(tokens, device=device)[:, None]
        wanted, rounded = (
            each(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(dim=-1).gather(1, chosen)[:, 0]
            for each in (exact, model)
        )
        ours = max(ours, (wanted - torch.tensor(told, device=device)).abs().max().item())
        theirs = max(theirs, (wanted - rounded).abs().max().item())
    return ours, theirs


def cases(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`rows` at once set the sizes of the recorded steps, `cache` how often rows must make room for others."""
    models: dict[str, Make] = {**DECODERS, "moe": tiny_moe}
    device = "cpu" if args.tiny else "cuda"
    if args.tiny:
        models = {name: models[name] for name in ("qwen3", "moe")}
    shapes = [(7, 4, 6, 1 << 17), (64, 16, 6, 1 << 21)]
    if not args.tiny:
        shapes += [(512, 16, 1, 1 << 21), (128, 16, 20, 1 << 23), (4096, 16, 20, 1 << 23), (33, 8, 70, 1 << 23)]
    for (name, make), backend, (chunk, block, rows, cache) in product(models.items(), paged_backends(device), shapes):
        sizes = {"chunk": chunk, "block": block, "rows": rows, "cache": cache}
        yield {"model": name, "make": make, "tier": "fast", "attention": backend, "warm": rows > 6, **sizes}
    make = models["qwen3"]
    sizes = {"chunk": 7, "block": 4, "rows": 6, "cache": 1 << 17}
    yield {"model": "qwen3", "make": make, "tier": "reference", "attention": "sdpa", "warm": False, **sizes}


OPTIONS = {
    "causal": AttentionOptions(0.2),
    "both ways": AttentionOptions(0.2, causal=False),
    "window": AttentionOptions(0.2, window=9),
    "softcap": AttentionOptions(0.2, softcap=3.0),
}


def check_packed(device: str) -> Iterator[dict[str, Any]]:
    lengths = (1, 70, 3, 129, 400)
    starts = [0, *accumulate(lengths)]
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    for dim, (name, options) in product((64, 128), OPTIONS.items()):
        merged = torch.randn(starts[-1], 8, dim, device=device).to(dtype)
        query, key, value = merged.split([4, 2, 2], dim=1)
        exact = SdpaAttention().packed(query.float(), key.float(), value.float(), PackedRows(starts), options)
        for backend in (*next(iter(paged_backends(device).values())), *PACKED_BACKENDS):
            where = {"check": "packed", "backend": backend.name, "dim": dim, "kind": name}
            refusal = explain_refusal(backend, merged.device, dtype, dim)
            if refusal is None:
                refusal = try_packed(backend, merged.device, dtype, dim, options) if backend.claims(options) else name
            if refusal is not None:
                yield {**where, "refused": refusal}
                continue
            found = backend.packed(query, key, value, PackedRows(starts), options).float()
            error = ((found - exact).norm() / exact.norm()).item()
            yield {**where, "error": error, "bound": PACKED, "ok": error < PACKED}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    device = "cpu" if args.tiny else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = False
    bad = 0

    def tell(result: dict[str, Any]) -> None:
        nonlocal bad
        bad += not result.get("ok", True)
        line = json.dumps(result)
        print(line, flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(line + "\n")

    backends = paged_backends(device)
    for case in cases(args):
        make = case.pop("make")
        torch.manual_seed(0)
        exact = build(make).to(device)
        prompts, driver = generate(copy.deepcopy(exact), torch.float32, backends[case["attention"]], case, device)
        wrong = check_tokens(exact, prompts, driver, device)
        stats = driver.loop.stats()
        told = {name: stats[f"{name}_total"] for name in ("preemptions", "prefix_cache_hits")}
        tell({"check": "fp32 greedy", **case, "answers": len(prompts), "differ": wrong, "ok": not wrong, **told})
        rounded = copy.deepcopy(exact).to(torch.bfloat16)
        prompts, driver = generate(rounded, torch.bfloat16, backends[case["attention"]], case, device)
        ours, theirs = check_logprobs(exact.to(torch.bfloat16), prompts, driver, device)
        bound = TIMES * theirs + LOGPROB
        tell({"check": "bf16 logprobs", **case, "worst": ours, "theirs": theirs, "bound": bound, "ok": ours < bound})
    for result in check_packed(device):
        tell(result)
    print(f"{bad} checks out of bounds", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
