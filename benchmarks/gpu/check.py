"""Parity on a CUDA card: our kernels and recorded steps against transformers' own greedy tokens, in fp32 and bf16."""

from __future__ import annotations

import copy
import random

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.tiny import DECODERS, build
from polymux.core.vocabulary import Failed, Submit, Tokens


def tiny_moe() -> torch.nn.Module:
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=97, hidden_size=32, intermediate_size=64, moe_intermediate_size=16, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
            norm_topk_prob=True, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )
    )  # fmt: skip


def check(name: str, make, tier: str, chunk: int, block: int, cache: int) -> None:
    random.seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build(make).cuda()
    reference = copy.deepcopy(model)
    decoder = TransformersDecoder(model)
    if tier == "fast":
        decoder = accelerate(decoder)
        if not isinstance(decoder, FastDecoder):
            raise RuntimeError(f"{name} is not on the fast tier")
    settings = SiteSettings(max_rows=6, max_units=chunk, block=block, cache_bytes=cache, superpage=1 << 14)
    site = Site(open_device("cuda"), settings, (TritonAttention(),))
    loop = Loop(site, {"m": GenerationProgram(TokenStage("d", decoder, site), "m")})
    prompts = [[random.randrange(3, 97) for _ in range(random.randrange(1, 60))] for _ in range(14)]
    prompts[5] = prompts[4] + prompts[5][:5]
    for i, prompt in enumerate(prompts):
        work = GenerateWork(
            prompts=[prompt], max_tokens=[24], seeds=[0], sampling=Sampling(temperature=0.0),
            logprobs=1 if i % 2 else None,
        )  # fmt: skip
        loop.handle(Submit(str(i), "m", "complete", pack(work)))
    out: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    while loop.jobs:
        loop.step()
        for report in loop.take_reports():
            if isinstance(report, Tokens):
                out[report.job] += report.ids
            if isinstance(report, Failed):
                print("FAILED", report.error)
    loop.step()
    loop.check_integrity()
    wrong = 0
    for i, prompt in enumerate(prompts):
        ids = torch.tensor([prompt], device="cuda")
        expected = reference.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=None
        )
        wrong += expected[0, len(prompt) :].tolist() != out[str(i)]
    stats = loop.stats()
    print(
        f"{name:8} {tier:9} chunk {chunk:3} block {block:2}: {wrong} of {len(prompts)} differ;"
        f" {stats['preemptions_total']:.0f} preemptions, {stats['prefix_cache_hits_total']:.0f} hits", flush=True
    )  # fmt: skip


if __name__ == "__main__":
    for name, make in {**DECODERS, "moe": tiny_moe}.items():
        check(name, make, "fast", 64, 16, 1 << 21)
        check(name, make, "fast", 7, 4, 1 << 17)
    check("qwen3", DECODERS["qwen3"], "reference", 7, 4, 1 << 17)
