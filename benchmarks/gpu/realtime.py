"""Sockets in real time on a CUDA card: streams of a large-v3 shape, paced by the wall clock, on random weights.

Every stream sends 100 ms of sound ten times a second and commits an utterance every six seconds; each look at an
unfinished utterance decodes a forced number of tokens and aligns them. A socket is in real time when its words keep
up: the figures are the streams that did, and how late first words and last words were.

PYTHONPATH=benchmarks python benchmarks/gpu/realtime.py --out benchmarks/results/RESULTS.jsonl
PYTHONPATH=benchmarks python benchmarks/gpu/realtime.py --tiny
PYTHONPATH=benchmarks python benchmarks/gpu/realtime.py --simulate   # 200 sockets on a card that is not there
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from ledger import record
from recognition import LARGE, TINY, TOKENS, build_model
from simulation import Clock
from tally import Tallies
from torch import Tensor

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.plan import Plan
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device, LaggedCpu, open_device
from polymux.core.compute.rules import LogitRule
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack, unpack
from polymux.core.tasks import Commit, Hear, Leave
from polymux.core.vocabulary import Failed, Output, Post, Submit
from polymux.modalities.asr import scribe
from polymux.modalities.asr.activity import Network, SpeechDetector, open_activity
from polymux.modalities.asr.alignment import Aligner, choose_heads, open_alignment
from polymux.modalities.asr.desk import Desk
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.pens import Pens
from polymux.modalities.asr.policies import AlignAtt, Hypothesis
from polymux.modalities.asr.program import HEAD_START_MS, LOOKS_ON_CARD, PATIENCE_MS, TranscriptionProgram
from polymux.modalities.asr.utterances import RATE
from polymux.modalities.asr.whisper import split_whisper
from polymux.modalities.asr.work import ListenWork, Written

STARTED = time.perf_counter()

CHUNK = RATE // 10
UTTERANCE = 60
"""Chunks of one utterance."""
FORCED = 8
"""Tokens of one look: nearly three seconds of speech that are not told yet."""
CERTAIN = 2
"""Tokens that a look finds certain: four a second, as people speak."""
LATE = 1.0
"""Seconds after which last words are late."""
LIMIT = 58.0
"""Seconds that it may take once everything is imported."""
STILL = 8.0
"""Seconds without a word, while words are due, after which nothing more is expected."""
BEHIND = 6.0
"""Seconds that the sender may be late: then the card does not keep up, and more of it would say no more."""
HEADS = [(7, 0), (10, 17), (12, 18), (13, 12), (16, 1), (17, 14), (19, 11), (21, 4), (24, 1), (25, 6)]


class Forced(LogitRule):
    """The end comes after `FORCED` tokens, and only then."""

    width = 1

    def begin(self) -> Sequence[int]:
        return (0,)

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        over = states >= FORCED
        ends = torch.arange(logits.shape[1], device=logits.device)[None] == TOKENS.end
        return logits.masked_fill(over ^ ends, float("-inf"))

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        return states + 1


class Steady(AlignAtt):
    """Aligned like AlignAtt; how much is certain is given, for random weights attend anywhere."""

    def judge(self, hypothesis: Hypothesis) -> int:
        return min(CERTAIN, len(hypothesis.tokens))

    def trim(self, hypothesis: Hypothesis) -> int:
        return len(hypothesis.tokens)


def build_loop(args: argparse.Namespace) -> Loop:
    if args.tiny:
        device, backends = LaggedCpu() if args.simulate else Device(), ()
    else:
        from polymux.core.compute.triton.attention import TritonAttention

        device, backends = open_device("cuda"), (TritonAttention(),)
    shape = TINY if args.tiny else LARGE
    model = build_model(shape, str(device.torch), torch.float32 if args.tiny else torch.bfloat16)
    settings = SiteSettings(max_rows=2 * args.streams, max_units=4096, cache_bytes=args.cache << 30)
    site = Site(device, settings, backends)
    encoder, decoder = split_whisper(model)
    if args.simulate:
        encoder.forward = lambda items, slabs: [None] * len(items)  # nobody reads what it heard
    encode = OneShotStage(
        "encode", encoder, site, max_units=args.together, max_rows=args.together, head_start_ms=HEAD_START_MS
    )
    decode = TokenStage("decode", decoder, site)
    heads = choose_heads(None if args.tiny else HEADS, shape["decoder_layers"], shape["decoder_attention_heads"])
    align = open_alignment(Aligner(decoder, heads, site), site)
    pens = Pens(args.looks)
    desk = Desk(encode, decode, TOKENS, "random", encoder.frames, lambda: Steady(lambda token: True), align, pens)
    desk.rules = desk.first_rules = (Forced(),)
    network = Network()
    with torch.no_grad():
        network.final_conv.bias.fill_(20.0)  # whatever is heard is speech
    activity = open_activity(SpeechDetector(network, site.device.torch), site)
    for stage in (activity, encode, decode, align):
        stage.patience_ms = args.patience
    hearing = Hearing(encode, decode, TOKENS, "random", align=align)
    return Loop(site, {"whisper": TranscriptionProgram(hearing, activity, encoder.samples, desk)})


def price_activity(plan: Plan) -> tuple[float, float]:
    return 3.5 + 0.05 * len(plan.grants), 1.0


def price_encode(plan: Plan) -> tuple[float, float]:
    windows = sum(grant.row.item.frames for grant in plan.grants) / 1500
    return 11.0 + 0.3 * len(plan.grants), 3.0 + 6.0 * windows


def price_decode(plan: Plan) -> tuple[float, float]:
    """Recorded where all rows take a single step."""
    if all(grant.count == 1 for grant in plan.grants):
        return 1.0, 2.5 + 0.07 * len(plan.grants)
    return 14.0 + 0.03 * len(plan.grants), 6.0 + 0.07 * len(plan.grants) + 0.02 * plan.units


def price_align(plan: Plan) -> tuple[float, float]:
    return 13.0 + 0.3 * len(plan.grants), 6.0 + 0.3 * len(plan.grants)


PRICES = {"activity": price_activity, "encode": price_encode, "decode": price_decode, "align": price_align}
"""As they were found on a large card, of a large-v3 shape."""


def say(what: str) -> None:
    print(f"{time.perf_counter() - STARTED:5.1f} s  {what}", flush=True)


class Streams:
    """All sockets: when each sends, and when its words came."""

    def __init__(self, loop: Loop, count: int, seconds: float, spread: float = UTTERANCE / 10) -> None:
        """Streams begin one after the other within `spread` seconds."""
        self.loop = loop
        self.tallies = Tallies(loop)
        self.count = count
        self.first: list[float] = []
        """Seconds from the beginning of each utterance to its first words."""
        self.last: list[list[float]] = [[] for _ in range(count)]
        """By stream, seconds from each commit to the last words."""
        self.behind = 0.0
        """Seconds that the sender itself was late at worst: the loop was busy."""
        self._heard_at = 0.0
        self._begun: dict[tuple[int, int], float] = {}
        self._heard: set[tuple[int, int]] = set()
        """Utterances whose first words came."""
        self._committed: dict[tuple[int, int], float] = {}
        rng = np.random.default_rng(0)
        sound = rng.normal(0, 0.1, CHUNK * 64).astype(np.float32)
        self._chunks = [pack(Hear(sound[start : start + CHUNK])) for start in range(0, len(sound), CHUNK)]
        chunks = int(seconds * 10) // UTTERANCE * UTTERANCE
        self._due = sorted(
            (stream * spread / count + place / 10, stream, place)
            for stream in range(count)
            for place in range(1, chunks + 1)
        )

    def run(self) -> None:
        """Raises `RuntimeError` where it stands still, falls far behind, or does not end in time."""
        work = pack(ListenWork(language="en"))
        for stream in range(self.count):
            self.loop.handle(Submit(str(stream), "whisper", "listen", work))
        start = time.perf_counter()
        place, told = 0, 0.0
        while place < len(self._due) or self._committed:
            now = time.perf_counter() - start
            if now >= told + 2.0:
                told = now
                say(self._describe(now) + "\n" + self.tallies.describe())
            self._watch(now, start)
            while place < len(self._due) and self._due[place][0] <= now:
                self.behind = max(self.behind, now - self._due[place][0])
                self._send(*self._due[place])
                place += 1
            if not self.loop.step():
                time.sleep(0.0005)
            for report in self.loop.take_reports():
                self._take(report, time.perf_counter() - start)
        for stream in range(self.count):
            self.loop.handle(Post(str(stream), pack(Leave())))
        while self.loop.jobs:
            self.loop.step()
        self.loop.step()
        self.loop.check_integrity()

    def _describe(self, now: float) -> str:
        stats = self.loop.stats()
        last = [late for each in self.last for late in each]
        worst = f", the latest by {max(last):.2f} s" if last else ""
        return (
            f"{now:.0f} s of sound are due, the sender was {self.behind:.2f} s late; {len(self.first)} first words, "
            f"{len(last)} last words{worst}, {len(self._committed)} awaited; {stats['launches_total']} launches, "
            f"{stats['rows_running']} rows run, {stats['rows_waiting']} wait"
        )

    def _watch(self, now: float, start: float) -> None:
        if self._committed and now - self._heard_at > STILL:
            raise RuntimeError(f"nothing was written for {STILL:g} s: {self._describe(now)}")
        if self.behind > BEHIND:
            raise RuntimeError(f"it does not keep up: {self._describe(now)}")
        if time.perf_counter() - STARTED > LIMIT:
            raise RuntimeError(f"it did not end within {LIMIT:g} s: {self._describe(now)}")

    def _send(self, due: float, stream: int, place: int) -> None:
        utterance = (place - 1) // UTTERANCE
        self._begun.setdefault((stream, utterance), due - 0.1)
        self.loop.handle(Post(str(stream), self._chunks[(stream + place) % len(self._chunks)]))
        if place % UTTERANCE == 0:
            self.loop.handle(Post(str(stream), pack(Commit())))
            if not self._committed:
                self._heard_at = due
            self._committed[stream, utterance] = due

    def _take(self, report: object, now: float) -> None:
        if isinstance(report, Failed):
            raise RuntimeError(report.error)
        if not (isinstance(report, Output) and report.kind == Written.__name__):
            return
        written = unpack(report.body, Written)
        self._heard_at = now
        key = (int(report.job), written.index)
        if written.tokens and key not in self._heard:
            self._heard.add(key)
            self.first.append(now - self._begun[key])
        if written.last:
            self.last[key[0]].append(now - self._committed.pop(key))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=18.0)
    parser.add_argument("--together", type=int, default=16, help="windows of one encoder pass")
    parser.add_argument("--looks", type=int, default=LOOKS_ON_CARD, help="at once, beside last words")
    parser.add_argument("--patience", type=float, default=PATIENCE_MS, help="ms that new rows wait for company")
    parser.add_argument("--cache", type=int, default=64, help="GiB")
    parser.add_argument("--tiny", action="store_true", help="a small shape on the CPU, to try the script")
    parser.add_argument("--simulate", action="store_true", help="that shape, by the clock of a card that is not there")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    clock = Clock()
    if args.simulate:
        clock.install()
        clock.sleep(STARTED - clock.now())
        args.tiny, args.cache, args.out = True, 4, None
    elif args.tiny:
        args.streams, args.seconds, args.cache = 3, 12.0, 2
    scribe.UNSURE = -float("inf")  # random weights are sure of nothing
    gc.collect()
    gc.freeze()
    say("imported")
    loop = build_loop(args)
    if args.simulate:
        clock.simulate(loop, PRICES)
    say("the model is there")
    for stage in loop.programs["whisper"].stages:
        stage.warm()
        say(f"{stage.name} is warm")
    Streams(
        loop, min(args.streams, 8), 6.0, spread=1.0
    ).run()  # windows of every length are encoded, all that is recorded is
    say("one utterance of a few sockets is written")
    streams = Streams(loop, args.streams, args.seconds)
    streams.run()
    kept = sum(max(late) <= LATE for late in streams.last)
    first, last = np.array(streams.first), np.array([late for each in streams.last for late in each])
    figures = {
        f"large-v3 shape, {args.streams} sockets: those whose last words were never later than {LATE:g} s": (
            kept,
            "sockets",
        ),
        f"large-v3 shape, {args.streams} sockets: first words after speech begins, p95": (
            np.quantile(first, 0.95),
            "s",
        ),
        f"large-v3 shape, {args.streams} sockets: last words after its end, p95": (np.quantile(last, 0.95), "s"),
    }
    for metric, (value, unit) in figures.items():
        print(f"{metric}: {value:.2f} {unit}", flush=True)
        if args.out:
            hardware = "CPU" if args.tiny else torch.cuda.get_device_name()
            record("realtime", metric, float(value), unit, hardware=hardware, results=args.out)
    for name, tally in streams.tallies.found.items():
        print(f"{name}: {tally}", flush=True)
    print(f"the sender was at most {streams.behind:.2f} s late; {len(last)} utterances", flush=True)


if __name__ == "__main__":
    main()
