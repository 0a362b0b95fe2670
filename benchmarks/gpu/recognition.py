"""Whisper on a CUDA card: windows of 30 s with 128 forced tokens each, on random weights of a real shape.

Samples go in, text goes out: voice activity, spectrograms, encoder, cross-attention slabs, decoding under Whisper's
rules and logprobs, all through the runtime. The figure is seconds of audio per second.

With `--speculation` a draft of two decoder layers behind the same encoder (distil-large-v3's shape) guesses five tokens
ahead. Weights are random, so what both say is laid over their logits: acceptance is forced (always right, or 7 of 10),
what they compute is not changed. Beside it the same model without guesses.

PYTHONPATH=benchmarks python benchmarks/gpu/recognition.py --out benchmarks/results/RESULTS.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/recognition.py --speculation --out benchmarks/results/RESULTS.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/recognition.py --tiny --speculation
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from kernels import profile
from ledger import record
from parrot import Parrot
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import WhisperConfig, WhisperForConditionalGeneration

from polymux.core.batch.drafting import DraftModel
from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenModel, TokenStage
from polymux.core.compute.device import Device, open_device
from polymux.core.engine.load import QUIET
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack, unpack
from polymux.core.vocabulary import Failed, Output, Post, Submit
from polymux.modalities.asr.activity import SpeechDetector, open_activity
from polymux.modalities.asr.decoder import WhisperDecoder
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.program import HEAD_START_MS, TranscriptionProgram
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import RATE, Endpointing
from polymux.modalities.asr.whisper import split_whisper
from polymux.modalities.asr.work import WINDOW, AudioChunk, TranscribeWork, WindowText

FORCED = 128
"""Tokens of every window: the most that an answer may have. The end is never drawn."""

GUESSES, DRAFT_LAYERS = 5, 2
SPECULATION: dict[str, float | None] = {"no guesses": None, "always right": 0.0, "right 7 of 10": 0.3}
"""The share of the draft's guesses that are wrong."""

PEER = "vLLM 0.26.0 offline, the same shape and lengths on the same kind of card, its best of several runs"
PEER_FIGURES = {1: 81.0, 64: 855.0}
"""Measured on another day; its features are extracted on the CPU."""

LARGE = {
    "vocab_size": 51866,
    "num_mel_bins": 128,
    "d_model": 1280,
    "encoder_layers": 32,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "decoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "decoder_ffn_dim": 5120,
    "max_source_positions": 1500,
}
TINY = {
    **LARGE,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 128,
    "decoder_ffn_dim": 128,
}

END, FIRST_LANGUAGE, NO_TIMESTAMPS = 50257, 50259, 50364
TOKENS = SpeechTokens(
    end=END,
    start=50258,
    previous=50362,
    no_speech=50363,
    no_timestamps=NO_TIMESTAMPS,
    transcribe=50360,
    translate=50359,
    languages={"en": FIRST_LANGUAGE},
    suppressed=tuple(range(END, NO_TIMESTAMPS)),
    suppressed_first=(220,),
    latest_start=50,
    longest=FORCED,
)


def build_model(shape: dict[str, int], device: str, dtype: torch.dtype) -> WhisperForConditionalGeneration:
    config = WhisperConfig(**shape, max_target_positions=448, pad_token_id=END, bos_token_id=END)
    config._attn_implementation = "sdpa"
    with torch.device("meta"):
        model = WhisperForConditionalGeneration(config).to(dtype)
    model.to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    return model.eval()


def build_loop(args: argparse.Namespace, *, forced: bool = False, errs: float | None = None) -> Loop:
    """`forced`: what is said is known beforehand; then a draft may guess it, but for a share of `errs`."""
    if args.tiny:
        device, backends = Device(), ()
    else:
        from polymux.core.compute.triton.attention import TritonAttention

        device, backends = open_device("cuda"), (TritonAttention(),)
    shape, dtype = (TINY, torch.float32) if args.tiny else (LARGE, torch.bfloat16)
    model = build_model(shape, str(device.torch), dtype)
    # beside every window's row there is one that asks how likely silence is
    settings = SiteSettings(
        max_rows=2 * max(args.windows),
        max_units=4096,
        cache_bytes=args.cache << 30,
        slice_ms=1000.0,
    )
    site = Site(device, settings, backends)
    encoder, decoder = split_whisper(model)
    drafter, target = None, decoder if not forced else Parrot(decoder)
    if errs is not None:
        draft = build_model({**shape, "encoder_layers": 1, "decoder_layers": DRAFT_LAYERS}, str(device.torch), dtype)
        draft.model.encoder = model.model.encoder
        above = encoder.attach(draft)
        target.slab = encoder.slab
        guessing: TokenModel = Parrot(WhisperDecoder(draft, encoder.slab, above=above), errs)
        drafter = DraftModel(guessing, site, GUESSES)
    hearing = Hearing(
        OneShotStage(
            "encode", encoder, site, max_units=args.together, max_rows=args.together, head_start_ms=HEAD_START_MS
        ),
        TokenStage("decode", target, site, drafter=drafter),
        TOKENS,
        "random",
    )
    activity = open_activity(SpeechDetector.load(site.device.torch), site)
    # as an engine does: later launches are recorded once nothing runs, not while a run's time is taken
    return Loop(site, {"whisper": TranscriptionProgram(hearing, activity, encoder.samples)}, QUIET)


BURST = 16
"""Recordings that come before the engine's next step: it works while others still come."""


def transcribe(loop: Loop, recordings: list[np.ndarray]) -> float:
    """Seconds until every window of 30 s has its tokens."""
    start = time.perf_counter()
    # a threshold of 0: whatever is heard is speech
    work = TranscribeWork(language="en", endpointing=Endpointing(threshold=0.0))
    for number, samples in enumerate(recordings):
        loop.handle(Submit(f"r{number}", "whisper", "transcribe", pack(work)))
        loop.handle(Post(f"r{number}", pack(AudioChunk(samples, last=True))))
        if number % BURST == BURST - 1:
            loop.step()
    counts = []
    while loop.jobs:
        loop.step()
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            if isinstance(report, Output) and report.kind == WINDOW:
                counts.append(len(unpack(report.body, WindowText).tokens))
    seconds = time.perf_counter() - start
    loop.check_integrity()
    if counts != [FORCED] * len(recordings):
        raise RuntimeError(f"{FORCED} tokens were asked for in each of {len(recordings)} windows; {counts} came")
    return seconds


def measure(args: argparse.Namespace, loop: Loop, windows: int) -> float:
    """Seconds of audio per second: the median of the runs after one that warms up."""
    rng = np.random.default_rng(0)
    runs = []
    for _ in range(args.runs + 1):
        # every run hears something else: what was computed before is not found again
        recordings = [rng.normal(0, 0.1, 30 * RATE).astype(np.float32) for _ in range(windows)]
        runs.append(windows * 30 / transcribe(loop, recordings))
    return statistics.median(runs[1:])


def note(args: argparse.Namespace, what: str, speed: float, peer: str | None, peer_value: float | None) -> None:
    metric = f"{'tiny' if args.tiny else 'large-v3'} shape, {what}"
    print(f"{metric}: {speed:.0f} x real time", flush=True)
    if args.out:
        hardware = "CPU" if args.tiny else torch.cuda.get_device_name()
        record(
            "recognition",
            metric,
            speed,
            "x real time",
            peer=peer,
            peer_value=peer_value,
            hardware=hardware,
            results=args.out,
        )


def explain(args: argparse.Namespace, loop: Loop) -> None:
    """Where the time of one window goes, and of many: one run each under the profiler, behind one that warms up."""
    rng = np.random.default_rng(1)

    def run(windows: int) -> float:
        return transcribe(loop, [rng.normal(0, 0.1, 30 * RATE).astype(np.float32) for _ in range(windows)])

    parts = [explain_encoder(args, loop)]
    mark(loop)
    for windows in args.windows:
        first, second = run(windows), run(windows)
        parts.append(f"==== {windows} windows: {first:.2f} s at first, then {second:.3f} s; under the profiler")
        print(parts[-1], flush=True)
        parts.append(profile(lambda windows=windows: run(windows)))
        args.profile.write_text("\n".join(parts))


def mark(loop: Loop) -> None:
    """What the host does bears names in the profile: each stage's launches and collections, and what the loop does."""

    def wrap(owner: object, method: str, name: str) -> None:
        call = getattr(owner, method)

        def marked(*given: object, **named: object) -> object:
            with torch.profiler.record_function(name):
                return call(*given, **named)

        setattr(owner, method, marked)

    for stage in loop.programs["whisper"].stages:
        wrap(stage, "launch", f"launch {stage.name}")
        wrap(stage, "collect", f"collect {stage.name}")
    wrap(loop, "_resume", "programs")
    wrap(loop, "handle", "commands")
    wrap(loop.scheduler, "plan", "plan")


def explain_encoder(args: argparse.Namespace, loop: Loop) -> str:
    """Milliseconds of encoder passes, and with each attention that torch has."""
    program = loop.programs["whisper"]
    encoder = program.hearing.encoder.model
    kinds = {"its own choice": None, "flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    told = []
    for windows in (1, args.together):
        samples = [np.zeros(encoder.samples, np.float32)] * windows
        slabs = list(torch.empty(windows, *encoder.slab.shape, dtype=encoder.slab.dtype, device=loop.site.device.torch))
        for name, kind in list(kinds.items())[: 1 if args.tiny else None]:
            with torch.inference_mode(), nullcontext() if kind is None else sdpa_kernel([kind]):
                times = []
                for _ in range(4):
                    began = time.perf_counter()
                    encoder.forward(samples, slabs)
                    launched = time.perf_counter()
                    if not args.tiny:
                        torch.cuda.synchronize()
                    times.append((time.perf_counter() - began, launched - began))
            took, host = min(times)
            told.append(f"encoder, {windows} windows, attention {name}: {1e3 * took:.2f} ms, host {1e3 * host:.2f} ms")
            print(told[-1], flush=True)
    return "\n".join(told)


def speculate(args: argparse.Namespace) -> None:
    """Windows of known text with and without a draft model, one after the other in the same process."""
    plain: dict[int, float] = {}
    for kind, errs in SPECULATION.items():
        loop = build_loop(args, forced=True, errs=errs)
        for windows in args.windows:
            speed = measure(args, loop, windows)
            stats = loop.stats()
            if errs is None:
                plain[windows] = speed
                print(f"{windows} windows without guesses: {speed:.0f} x real time", flush=True)
                continue
            share = stats["accepted_tokens_total"] / stats["guessed_tokens_total"]
            print(f"    guesses that were right: {share:.2f}", flush=True)
            metric = (
                f"{windows} windows of 30 s, {FORCED} tokens, draft of {DRAFT_LAYERS} layers guesses "
                f"{GUESSES}, random weights, acceptance forced: {kind}"
            )
            note(args, metric, speed, "ours without guesses, the same run", plain[windows])
        del loop
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--together", type=int, default=16, help="windows of one encoder pass")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", type=int, default=48, help="GiB")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to try the script")
    parser.add_argument("--speculation", action="store_true", help="with and without a draft model, and nothing else")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path, help="tell there where the time goes, and measure nothing")
    args = parser.parse_args()
    if args.tiny:
        args.windows, args.runs, args.cache = [1, 3], 1, 1
    gc.collect()
    if args.speculation:
        speculate(args)
        return
    gc.freeze()
    loop = build_loop(args)
    if args.profile:
        explain(args, loop)
        return
    for windows in args.windows:
        peer = (PEER, PEER_FIGURES[windows]) if windows in PEER_FIGURES else (None, None)
        note(args, f"{windows} windows of 30 s, {FORCED} tokens", measure(args, loop, windows), *peer)


if __name__ == "__main__":
    main()
