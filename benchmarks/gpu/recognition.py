"""Whisper on a CUDA card: windows of 30 s with 128 forced tokens each, on random weights of a real shape.

Samples go in, text goes out: voice activity, spectrograms, encoder, cross-attention slabs, decoding under Whisper's
rules and logprobs, all through the runtime. The figure is seconds of audio per second.

PYTHONPATH=benchmarks python benchmarks/gpu/recognition.py --out benchmarks/results/RESULTS.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/recognition.py --tiny
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path

import numpy as np
import torch
from ledger import record
from transformers import WhisperConfig, WhisperForConditionalGeneration

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device, open_device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack, unpack
from polymux.core.vocabulary import Failed, Output, Post, Submit
from polymux.modalities.asr.activity import SpeechDetector, open_activity
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.program import TranscriptionProgram
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import RATE, Endpointing
from polymux.modalities.asr.whisper import split_whisper
from polymux.modalities.asr.work import WINDOW, AudioChunk, TranscribeWork, WindowText

FORCED = 128
"""Tokens of every window. The end is never drawn, and half the context is for what is said."""

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
)


def build_model(shape: dict[str, int], device: str, dtype: torch.dtype) -> WhisperForConditionalGeneration:
    config = WhisperConfig(**shape, max_target_positions=2 * FORCED, pad_token_id=END, bos_token_id=END)
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


def build_loop(args: argparse.Namespace) -> Loop:
    if args.tiny:
        device, backends = Device(), ()
    else:
        from polymux.core.compute.triton.attention import TritonAttention

        device, backends = open_device("cuda"), (TritonAttention(),)
    model = build_model(TINY if args.tiny else LARGE, str(device.torch), torch.float32 if args.tiny else torch.bfloat16)
    # beside every window's row there is one that asks how likely silence is
    settings = SiteSettings(
        max_rows=2 * max(args.windows),
        max_units=4096,
        cache_bytes=args.cache << 30,
        slice_ms=1000.0,
    )
    site = Site(device, settings, backends)
    encoder, decoder = split_whisper(model)
    hearing = Hearing(
        OneShotStage("encode", encoder, site, max_units=args.together, max_rows=args.together),
        TokenStage("decode", decoder, site),
        TOKENS,
        "random",
    )
    activity = open_activity(SpeechDetector.load(site.device.torch), site)
    return Loop(site, {"whisper": TranscriptionProgram(hearing, activity, encoder.samples)})


def transcribe(loop: Loop, recordings: list[np.ndarray]) -> float:
    """Seconds until every window of 30 s has its tokens."""
    start = time.perf_counter()
    # a threshold of 0: whatever is heard is speech
    work = TranscribeWork(language="en", endpointing=Endpointing(threshold=0.0))
    for number, samples in enumerate(recordings):
        loop.handle(Submit(f"r{number}", "whisper", "transcribe", pack(work)))
        loop.handle(Post(f"r{number}", pack(AudioChunk(samples, last=True))))
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--together", type=int, default=16, help="windows of one encoder pass")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--cache", type=int, default=48, help="GiB")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to try the script")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.windows, args.runs, args.cache = [1, 3], 1, 1
    gc.collect()
    gc.freeze()
    loop = build_loop(args)
    rng = np.random.default_rng(0)
    for windows in args.windows:
        # every run hears something else: what was computed before is not found again
        runs = []
        for _ in range(args.runs + 1):
            recordings = [rng.normal(0, 0.1, 30 * RATE).astype(np.float32) for _ in range(windows)]
            runs.append(windows * 30 / transcribe(loop, recordings))
        speed = statistics.median(runs[1:])  # the first warms up
        print(f"large-v3 shape, {windows} windows: {speed:.0f} x real time", flush=True)
        if args.out:
            record(
                "recognition",
                f"large-v3 shape, {windows} windows of 30 s, {FORCED} tokens",
                speed,
                "x real time",
                peer=PEER if windows in PEER_FIGURES else None,
                peer_value=PEER_FIGURES.get(windows),
                hardware="CPU" if args.tiny else torch.cuda.get_device_name(),
                results=args.out,
            )
    if args.profile:
        with torch.profiler.profile() as profile:
            transcribe(loop, [rng.normal(0, 0.1, 30 * RATE).astype(np.float32) for _ in range(max(args.windows))])
        args.profile.write_text(profile.key_averages().table(sort_by="cuda_time_total", row_limit=30))


if __name__ == "__main__":
    main()
