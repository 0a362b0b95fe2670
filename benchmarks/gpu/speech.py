"""Speech synthesis on a CUDA card, random weights of the public shapes.

vits   64 MMS texts at once: seconds of audio a second
csm    64 CSM-1B streams at once: time to first audio, every stream's real-time factor, stalls of a player that starts
       with the first sound; launches of a frame's depth decoder. Then the most streams that all keep up: doubled until
       some do not, then halved in between, as long as there is time

Both in one call, in under four minutes (`--seconds`); lines are printed, and figures written, as they come.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/speech.py vits csm --out figures.jsonl
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
from ledger import record
from shapes import build_model
from torch.utils._python_dispatch import TorchDispatchMode

from polymux.core.compute.device import open_device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack, unpack
from polymux.core.pipeline import Program
from polymux.core.speech.telling import Spoken
from polymux.core.testing.tiny import build
from polymux.core.testing.voices import tiny_csm, tiny_vits
from polymux.core.vocabulary import Ended, Failed, Output, Post, Submit
from polymux.modalities.tts import codec_program
from polymux.modalities.tts.codec_load import build_csm
from polymux.modalities.tts.vits_program import build_vits
from polymux.modalities.tts.work import Piece, SpeakWork

BEGAN = time.perf_counter()

SECONDS = 10.0
"""Of each CSM stream: random weights do not come to an end."""

TEXTS = 64
FRAMES_PER_ID = 2.0
"""Of MMS voices, with the blanks between characters: random weights are paced to that."""


@dataclass
class Stream:
    """When a stream's sounds came, and how long they are."""

    arrivals: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    done: float = 0.0

    @property
    def stall(self) -> float:
        """Seconds that a player which starts with the first sound would have to wait in between."""
        worst, played = 0.0, 0.0
        for arrival, length in zip(self.arrivals, self.seconds):
            worst = max(worst, arrival - self.arrivals[0] - played)
            played += length
        return worst


def serve(program: Any, site: Site, works: list[tuple[SpeakWork, list[Piece]]]) -> tuple[list[Stream], float]:
    """Every work at once, until all have ended; the seconds that took."""
    loop = Loop(site, {"voice": program})
    streams: dict[str, Stream] = defaultdict(Stream)
    began = time.perf_counter()
    for number, (work, pieces) in enumerate(works):
        job = str(number)
        loop.handle(Submit(job, "voice", "speak", pack(work)))
        for piece in [*pieces, Piece(last=True)]:
            loop.handle(Post(job, pack(piece)))
    while loop.jobs:
        loop.step()
        now = time.perf_counter() - began
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            if isinstance(report, Output):
                stream = streams[report.job]
                stream.arrivals.append(now)
                stream.seconds.append(len(unpack(report.body, Spoken).samples) / program.rate)
            if isinstance(report, Ended):
                streams[report.job].done = now
    elapsed = time.perf_counter() - began
    loop.step()
    loop.check_integrity()
    return [streams[job] for job in sorted(streams, key=int)], elapsed


def prepare(program: Program) -> None:
    """What an engine does before its first request, and while nothing runs."""
    for stage in program.stages:
        stage.warm()
        while stage.tend():
            pass


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(math.ceil(share * len(ordered)) - 1, len(ordered) - 1)]


Note = Callable[..., None]
Figures = dict[str, float]


def tell(**line: Any) -> None:
    print(json.dumps({"seconds": round(time.perf_counter() - BEGAN, 1), **line}), flush=True)


def run_csm(args: argparse.Namespace, shapes: dict[str, Any], note: Note) -> None:
    codec_program.LONGEST = 2.0 if args.tiny else SECONDS
    model = build(tiny_csm) if args.tiny else build_model(shapes["csm-1b"], args.device)
    settings = SiteSettings(max_rows=args.most, max_units=4096, block=16, cache_bytes=args.cache << 20)
    site = open_site(args, settings)
    program: Program = build_csm(model, site, "csm", {"temperature": 0.9, "top_k": 5 if args.tiny else 50})
    tell(csm="built")
    prepare(program)
    launches = count_launches(program.decoder.model.depth, args.streams, args.device)  # type: ignore[attr-defined]
    tell(csm="prepared", launches_of_a_frame=launches, frame_ms=program.codec.hop / program.rate * 1e3)  # type: ignore[attr-defined]
    vocabulary, offset = model.config.text_vocab_size, model.config.vocab_size

    def measure(streams: int) -> Figures:
        """The second time, which is what counts: the first records graphs and plans for so many rows."""
        figures: Figures = {}
        for attempt in range(2):
            generator = random.Random(attempt)
            prompts = [
                [offset + generator.randrange(vocabulary) for _ in range(generator.randint(10, 60))]
                for _ in range(streams)
            ]
            works = [(SpeakWork(None, seed), [Piece(prompt)]) for seed, prompt in enumerate(prompts)]
            figures = describe(*serve(program, site, works))
            tell(csm="warm-up" if attempt == 0 else "measured", streams=streams, **figures)
        where = f"CSM-1B shape, {streams} streams at once"
        note(f"{where}, time to first audio, p95", figures["first_audio_p95_ms"], "ms")
        note(f"{where}, time a second of sound takes, slowest stream", figures["real_time_factor_worst"], "s")
        note(f"{where}, seconds of audio a second", figures["audio_seconds_a_second"], "s/s")
        return figures

    kept, certain = search_most(args.streams, args.most, lambda streams: keeps_up(measure(streams)), args.seconds)
    tell(csm="sustained", streams=kept, certain=certain)
    note("CSM-1B shape, most streams found at which none stalls", kept, "streams")


def keeps_up(figures: Figures) -> bool:
    return not figures["stalled"] and figures["real_time_factor_worst"] < 1


def search_most(first: int, most: int, good: Callable[[int], bool], seconds: float) -> tuple[int, bool]:
    """The largest number found that is good, to an eighth, and whether the next one was found not to be. No new number
    is begun that would probably not end in time."""
    low, high, streams, longest = 0, most + 1, first, 0.0
    while time.perf_counter() - BEGAN + 2 * longest < seconds:
        began = time.perf_counter()
        if good(streams):
            low = streams
        else:
            high = streams
        longest = max(longest, time.perf_counter() - began)
        if high - low <= max(low // 8, 1):
            return low, high <= most
        streams = min(2 * low, most) if high > most else (low + high) // 2
        if streams == low:
            return low, False
    return low, False


class Counter(TorchDispatchMode):
    """Counts what a card would be told to do: operations that are neither views nor allocations."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        views = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        self.count += not views and "empty" not in func.__name__
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def count_launches(depth: Any, rows: int, device: str) -> int:
    """Of one frame's further codes, before they are recorded. A CPU does some steps in several operations that are one
    kernel on a card."""
    hidden = torch.zeros(rows, depth.width, dtype=depth.dtype, device=device)
    tokens = torch.zeros(rows, dtype=torch.int64, device=device)

    def run() -> None:
        depth.forward(hidden, tokens, lambda number, logits: logits.argmax(dim=-1))

    run()
    if device == "cpu":
        with Counter() as counter:
            run()
        return counter.count
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def describe(streams: list[Stream], elapsed: float) -> dict[str, float]:
    firsts = [stream.arrivals[0] * 1e3 for stream in streams]
    factors = [stream.done / sum(stream.seconds) for stream in streams]
    return {
        "first_audio_p50_ms": statistics.median(firsts),
        "first_audio_p95_ms": percentile(firsts, 0.95),
        "real_time_factor_worst": max(factors),
        "stalled": sum(stream.stall > 0.005 for stream in streams),
        "worst_stall_ms": max(stream.stall for stream in streams) * 1e3,
        "audio_seconds_a_second": sum(sum(stream.seconds) for stream in streams) / elapsed,
    }


def run_vits(args: argparse.Namespace, shapes: dict[str, Any], note: Note) -> None:
    torch.manual_seed(0)
    model = tiny_vits().eval() if args.tiny else build_model(shapes["mms-tts"], args.device, torch.float32)
    site = open_site(args, SiteSettings(max_rows=args.texts, cache_bytes=64 << 20))
    program = build_vits(copy.deepcopy(model), site)  # transformers keeps the model as it made it
    vocoder: Any = program.vocoder.model
    prepare(program)
    tell(vits="prepared", layout=str(vocoder.layout))
    generator, longest = random.Random(0), 70 if args.tiny else 300
    vocabulary, count = model.config.vocab_size, min(args.texts, 3) if args.tiny else args.texts
    texts = [[generator.randrange(1, vocabulary) for _ in range(generator.randint(60, longest))] for _ in range(count)]
    pace = calibrate(model, texts[0], args.device)
    works = [(SpeakWork(None, seed), [Piece(ids, pace=pace)]) for seed, ids in enumerate(texts)]
    figures: Figures = {}
    for attempt in range(args.runs + 1):
        with watch_passes(program) as seen:
            figures = describe(*serve(program, site, works))
        tell(vits="warm-up" if attempt == 0 else "measured", texts=count, **figures, **seen)
    peer = [speak_whole(model, texts, pace, args.device) for _ in range(args.runs + 1)][1:]
    tell(vits="transformers", audio_seconds_a_second=max(peer))
    where = f"MMS-VITS shape, {count} texts at once"
    note(
        f"{where}, seconds of audio a second",
        figures["audio_seconds_a_second"],
        "s/s",
        peer=f"transformers {transformers.__version__}, one padded batch",
        peer_value=max(peer),
    )
    note(f"{where}, time to first audio, p95", figures["first_audio_p95_ms"], "ms")


@contextmanager
def watch_passes(program: Any) -> Iterator[Figures]:
    """Passes of each stage, the host's milliseconds in them, and the frames that the vocoder computes."""
    seen: Figures = defaultdict(float)
    with ExitStack() as stack:
        for stage in (program.reader, program.flow, program.vocoder):
            name, run = stage.name.split("/")[-1], stage.model.forward

            def forward(items: Any, slabs: Any, name: str = name, run: Any = run) -> Any:
                began = time.perf_counter()
                results = run(items, slabs)
                seen[f"{name}_passes"] += 1
                seen[f"{name}_host_ms"] += (time.perf_counter() - began) * 1e3
                return results

            stack.enter_context(mock.patch.object(stage.model, "forward", forward))
        hook = program.vocoder.model.decoder.register_forward_pre_hook(
            lambda module, inputs: seen.update(frames=seen["frames"] + inputs[0].shape[0] * inputs[0].shape[3])
        )
        stack.callback(hook.remove)
        yield seen


@torch.inference_mode()
def calibrate(model: Any, ids: list[int], device: str) -> float:
    """The pace at which random weights speak about as fast as trained ones."""
    model.speaking_rate = 1.0
    latents = model(torch.tensor([ids], device=device)).spectrogram
    return max(latents.shape[-1] / len(ids) / FRAMES_PER_ID, 0.25)


@torch.inference_mode()
def speak_whole(model: Any, texts: list[list[int]], pace: float, device: str) -> float:
    """transformers on the same texts, as one padded batch: seconds of audio a second."""
    length = max(map(len, texts))
    ids = torch.tensor([[*text, *[0] * (length - len(text))] for text in texts], device=device)
    mask = torch.tensor([[1] * len(text) + [0] * (length - len(text)) for text in texts], device=device)
    began = time.perf_counter()
    output = model(ids, attention_mask=mask, speaking_rate=pace)
    output.waveform.cpu()
    seconds = output.sequence_lengths.sum().item() / model.config.sampling_rate
    return seconds / (time.perf_counter() - began)


def open_site(args: argparse.Namespace, settings: SiteSettings) -> Site:
    if args.device == "cpu":
        return Site(open_device("cpu"), settings)
    from polymux.core.compute.triton.attention import TritonAttention

    return Site(open_device(args.device), settings, (TritonAttention(),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workloads", nargs="+", choices=["vits", "csm"])
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--streams", type=int, default=64, help="of the first measurement")
    parser.add_argument("--most", type=int, default=512, help="streams to try")
    parser.add_argument("--texts", type=int, default=TEXTS, help="of MMS at once")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=210.0, help="for everything")
    parser.add_argument("--cache", type=int, default=24_576, help="MiB")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny models on the CPU, to see that all of this runs")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.tiny:
        args.device, args.streams, args.most, args.runs, args.cache = "cpu", 2, 5, 1, 64
    hardware = torch.cuda.get_device_name() if args.device != "cpu" else None

    def note(metric: str, value: float, unit: str, **peer: Any) -> None:
        if args.out:
            record("speech", metric, value, unit, hardware=hardware, results=args.out, **peer)

    shapes = json.loads(args.shapes.read_text())
    for name, run in (("vits", run_vits), ("csm", run_csm)):  # the short one first
        if name in args.workloads:
            run(args, shapes, note)


if __name__ == "__main__":
    main()
