"""Every class of model, tiny, built on the card, prepared as an engine prepares it, and asked a few things at once.

Minutes of a card are few: what would crash crashes here, in seconds, and says where. Each class is a process of its
own, all at the same time, since an error on a card is the end of its process; launches wait for their kernels
(`CUDA_LAUNCH_BLOCKING`), so that a traceback names the one that failed.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/smoke.py [--tiny] [CLASS ...]
With --tiny: on the CPU. Prints a line for each class; the exit status counts those that failed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import IO

import numpy as np
import torch
from msgspec import Struct

from polymux.core.compute.device import Device, open_device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.pipeline import Program
from polymux.core.tasks import Sampling
from polymux.core.testing.tiny import DECODERS, bring, build
from polymux.core.vocabulary import Failed, Post, Submit

PATIENCE = 60.0
"""Seconds for a class, its imports and compilers included."""

LINES = 40
"""Shown of what a class said that failed."""

OPTIONAL = ("diffusers", "PIL")
"""Packages without which a class is left out."""

LONGEST = 512
"""Tokens of a launch: more than the contexts of the small models, as it is with large ones."""

Asked = tuple[str, Struct, list[Struct]]
"""A task, its work, and what is posted to it."""

Served = tuple[Program, list[Asked]]


def open_site(device: Device) -> Site:
    settings = SiteSettings(max_rows=16, max_units=LONGEST, cache_bytes=1 << 26, superpage=1 << 20)
    if device.torch.type == "cpu":
        return Site(device, settings)
    from polymux.core.compute.triton.attention import TritonAttention

    return Site(device, settings, (TritonAttention(),))


def number_format(site: Site) -> torch.dtype:
    return torch.float32 if site.device.torch.type == "cpu" else torch.bfloat16


def make_chat(make: Callable[[], torch.nn.Module]) -> Callable[[Site], Served]:
    def open_chat(site: Site) -> Served:
        from polymux.core.batch.tokens import TokenStage
        from polymux.core.compute.decoder import TransformersDecoder
        from polymux.core.compute.fast import accelerate
        from polymux.core.generation.program import GenerationProgram
        from polymux.core.generation.work import GenerateWork

        decoder = accelerate(TransformersDecoder(bring(build(make), site.device.torch, number_format(site))))
        common = [7 + place % 80 for place in range(300)]  # read once for all rows
        samplings = [
            Sampling(temperature=0.0),
            Sampling(temperature=0.8),
            Sampling(temperature=0.8, top_k=5, top_p=0.9),
            Sampling(temperature=0.0, repetition_penalty=1.2),
        ]
        works: list[Asked] = []
        for number in range(12):
            prompt = [*common, *range(3, 5 + number)] if number < 10 else [5] * (3 if number == 10 else 480)
            logprobs = 2 if number == 3 else None
            work = GenerateWork(
                prompts=[prompt], max_tokens=[24], seeds=[number], sampling=samplings[number % 4], logprobs=logprobs
            )
            works.append(("complete", work, []))
        return GenerationProgram(TokenStage("decode", decoder, site), "m"), works

    return open_chat


def open_moe(site: Site) -> Served:
    from check import tiny_moe

    return make_chat(tiny_moe)(site)


def open_llama(site: Site) -> Served:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 97}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 1, "max_position_embeddings": 512}
    return make_chat(lambda: LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=False)))(site)


def open_whisper(site: Site) -> Served:
    from recognition import TINY, TOKENS, build_model

    from polymux.core.batch.oneshot import OneShotStage
    from polymux.core.batch.tokens import TokenStage
    from polymux.modalities.asr.activity import SpeechDetector, open_activity
    from polymux.modalities.asr.hearing import Hearing
    from polymux.modalities.asr.program import TranscriptionProgram
    from polymux.modalities.asr.utterances import RATE, Endpointing
    from polymux.modalities.asr.whisper import split_whisper
    from polymux.modalities.asr.work import AudioChunk, TranscribeWork

    encoder, decoder = split_whisper(build_model(TINY, str(site.device.torch), number_format(site)))
    encode = OneShotStage("encode", encoder, site, max_units=2, max_rows=2)
    hearing = Hearing(encode, TokenStage("decode", decoder, site), TOKENS, "random")
    activity = open_activity(SpeechDetector.load(site.device.torch), site)
    program = TranscriptionProgram(hearing, activity, encoder.samples)
    rng = np.random.default_rng(0)
    works: list[Asked] = []
    for seconds in (2.0, 5.0, 31.0):
        samples = rng.normal(0, 0.1, int(seconds * RATE)).astype(np.float32)
        work = TranscribeWork(language="en", endpointing=Endpointing(threshold=0.0))
        works.append(("transcribe", work, [AudioChunk(samples, last=True)]))
    return program, works


def speak(counts: list[int], ids: range, pace: float = 1.0) -> list[Asked]:
    from polymux.modalities.tts.work import Piece, SpeakWork

    draw = np.random.default_rng(0)
    return [
        ("speak", SpeakWork(None, seed), [Piece(draw.integers(ids.start, ids.stop, count).tolist(), pace=pace),
                                          Piece(last=True)])
        for seed, count in enumerate(counts)
    ]  # fmt: skip


def open_csm(site: Site) -> Served:
    from polymux.core.testing.voices import CODES, tiny_csm
    from polymux.modalities.tts import codec_program
    from polymux.modalities.tts.codec_load import build_csm

    codec_program.LONGEST = 3.0
    model = build(lambda: tiny_csm(256, head_dim=16))
    model.config.codebook_eos_token_id = CODES + 1  # never drawn by an imagined card
    model = bring(model, site.device.torch, number_format(site))
    program = build_csm(model, site, "csm", {"temperature": 0.9, "top_k": 5})
    return program, speak([10, 40, 11, 3, 60], range(CODES + 3, CODES + 90))


def open_vits(site: Site) -> Served:
    from polymux.core.testing.voices import tiny_vits
    from polymux.modalities.tts.vits_program import build_vits

    torch.manual_seed(0)
    program = build_vits(bring(tiny_vits(), site.device.torch), site)
    return program, speak([60, 70, 90, 140, 5, 61], range(1, 30))


def open_embedder(site: Site) -> Served:
    from transformers import BertConfig, BertModel

    from polymux.core.batch.oneshot import OneShotStage
    from polymux.core.compute.load import prepare_body
    from polymux.modalities.llm.embedder import TextEmbedder
    from polymux.modalities.llm.program import EmbeddingProgram
    from polymux.modalities.llm.work import EmbedWork

    sizes = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2}
    make = lambda: BertModel(BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=512))  # noqa: E731
    embedder = TextEmbedder(prepare_body(bring(build(make), site.device.torch, number_format(site))), site, "mean")
    stage = OneShotStage("embed", embedder, site, max_units=2048, to_host=True)
    works: list[Asked] = [
        ("embed", EmbedWork.of([[3 + place % 90 for place in range(count)] for count in counts]), [])
        for counts in ([1], [5, 80, 300], [510], [20] * 40)
    ]
    return EmbeddingProgram(stage, embedder), works


def open_seer(site: Site) -> Served:
    from vision import TINY
    from vision_requests import Asker, build_program, draw_file

    program = build_program(site, TINY, number_format(site), encoded=512)
    asker = Asker(1, 8, 6)
    works = [
        asker.write(draw_file(number % 2, side), random.Random(number)) for number, side in enumerate((64, 64, 96))
    ]
    return program, [("chat", work, []) for work in works]


def open_flux(site: Site) -> Served:
    from polymux.core.batch.denoise import DenoiseStage
    from polymux.core.batch.trajectory import DenoiseRequest
    from polymux.core.testing.denoising import (
        CHANNELS,
        JOINT,
        POOLED,
        DenoiseProgram,
        DenoiseWork,
        flow_scheduler,
        tiny_flux,
    )
    from polymux.modalities.diffusion import flux

    device, dtype = site.device.torch, number_format(site)
    model = flux.FluxDenoiser(bring(tiny_flux(), device, dtype))
    if device.type == "cuda":
        from polymux.modalities.diffusion.flux_kernels import KernelSteps

        model.merge(steps=KernelSteps())
        model.record()
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    requests = {}
    for number, side in enumerate((8, 8, 12)):
        condition = {flux.PROMPT: draw(5, JOINT), flux.POOLED: draw(POOLED), flux.GUIDANCE: draw(1)[0].float()}
        scheduler = flow_scheduler()
        scheduler.set_timesteps(6, mu=0.7)
        requests[str(number)] = DenoiseRequest((CHANNELS, side, side), scheduler, (condition,), seed=number)
    stage = DenoiseStage("denoise", model, site, max_units=4096)
    return DenoiseProgram(stage, requests), [("denoise", DenoiseWork([name]), []) for name in requests]


CLASSES: dict[str, Callable[[Site], Served]] = {
    "llama": open_llama,
    "qwen3": make_chat(DECODERS["qwen3"]),
    "gemma3": make_chat(DECODERS["gemma3"]),
    "moe": open_moe,
    "whisper": open_whisper,
    "csm": open_csm,
    "vits": open_vits,
    "embedder": open_embedder,
    "vlm": open_seer,
    "flux": open_flux,
}


def serve(program: Program, asked: list[Asked], site: Site) -> int:
    """Prepare as an engine does, answer everything, do what is done while nothing runs, and answer all again. How many
    reports came."""
    loop = Loop(site, {"m": program})
    for stage in program.stages:
        stage.warm()
    count = 0
    for turn in range(2):
        for number, (task, work, posts) in enumerate(asked):
            job = f"{turn}.{number}"
            loop.handle(Submit(job, "m", task, pack(work)))
            for body in posts:
                loop.handle(Post(job, pack(body)))
        while loop.jobs:
            loop.step()
            for report in loop.take_reports():
                if isinstance(report, Failed):
                    raise RuntimeError(report.error)
                count += 1
        while loop.step():
            pass
        loop.check_integrity()
    return count


def check(name: str, device: Device) -> int:
    site = open_site(device)
    return serve(*CLASSES[name](site), site)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("classes", nargs="*", choices=[[], *CLASSES])
    parser.add_argument("--one", choices=list(CLASSES), help="in this process")
    parser.add_argument("--abreast", type=int, default=12, help="classes at the same time")
    parser.add_argument("--tiny", action="store_true", help="on the CPU, to see that all of this runs")
    args = parser.parse_args()
    if args.one:
        try:
            print(json.dumps({"reports": check(args.one, open_device("cpu" if args.tiny else "cuda"))}))
        except ModuleNotFoundError as missing:
            if missing.name not in OPTIONAL:
                raise
            print(f"left out: there is no {missing.name} here")
        return
    sys.exit(check_all(args.classes or list(CLASSES), tiny=args.tiny, abreast=1 if args.tiny else args.abreast))


@dataclass
class Running:
    """A class in a process of its own."""

    process: subprocess.Popen[bytes]
    said: IO[bytes]
    began: float


def check_all(names: list[str], *, tiny: bool, abreast: int) -> int:
    """Every class; how many failed."""
    environment = {**os.environ, "CUDA_LAUNCH_BLOCKING": "1"}
    command = [sys.executable, __file__, *(["--tiny"] if tiny else []), "--one"]
    waiting, running, failed = list(names), dict[str, Running](), 0
    while waiting or running:
        while waiting and len(running) < abreast:
            name, said = waiting.pop(0), tempfile.TemporaryFile()  # noqa: SIM115 (read when the process has ended)
            process = subprocess.Popen([*command, name], stdout=said, stderr=subprocess.STDOUT, env=environment)
            running[name] = Running(process, said, time.perf_counter())
        name, one = next(iter(running.items()))
        del running[name]
        try:
            patience = PATIENCE * (4 if tiny else 1)
            one.process.wait(max(patience - (time.perf_counter() - one.began), 1))
        except subprocess.TimeoutExpired:
            one.process.kill()
            one.process.wait()
            one.said.write(b"\nit took too long\n")
        seconds, status = round(time.perf_counter() - one.began, 1), one.process.returncode
        one.said.seek(0)
        lines = one.said.read().decode(errors="replace").splitlines()
        told = lines[-1] if lines and not status else ""
        print(json.dumps({"class": name, "seconds": seconds, "status": status, "told": told}), flush=True)
        if status:
            failed += 1
            print("\n".join(lines[-LINES:]), flush=True)
    return failed


if __name__ == "__main__":
    main()
