"""Speech through the gateway over HTTP: how soon sound begins, and whether many streams keep up with their listeners.

first    a long text: milliseconds from the request to the first sound, over `--runs`; the peer is the voice's package
         alone, in this process: from the text to its first sentence
streams  8 long texts at once: the slowest stream's seconds for a second of sound, and whether a player would stall; the
         peer says them in this process, on a thread for each core, with one thread of its own or as many as it likes,
         whichever is faster. Sound a second is the median over `--runs`, of both; the first sound of the last of the
         eight is the worst over them, of the package's threads where that is better

nice -n -19 python benchmarks/speech.py --write

Not at a real-time priority: there nothing interrupts a thread that computes, and who listens waits for whole pieces.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import httpx
import polymux_starter
from hibari import Hibari
from ledger import record

from polymux.core.assembly import assemble
from polymux.core.config import Settings
from polymux.core.plugins import load_plugins
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings

STREAMS = 8
RATE = 24_000
STORY = (
    "The morning train was late, so the students walked to school together. A gardener planted seven apple trees "
    "behind the old stone house. Rain fell on the quiet harbor while the fishermen repaired their nets. The teacher "
    "asked a simple question, and every hand went up at once. After dinner, they sat by the fire and listened to the "
    "wind. "
)


@dataclass
class Heard:
    """What a listener got. Seconds from the request."""

    first: float
    total: float
    sound: float
    stall: float
    """The longest that a player which starts with the first sound would have to wait in between."""


async def listen(client: httpx.AsyncClient, text: str) -> Heard:
    body = {"model": polymux_starter.SPEAK.name, "input": text, "response_format": "pcm"}
    began = time.perf_counter()
    first, samples, stall = 0.0, 0, 0.0
    async with client.stream("POST", "/v1/audio/speech", json=body) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_bytes():
            now = time.perf_counter() - began
            first = first or now
            stall = max(stall, now - first - samples / RATE)
            samples += len(chunk) // 2
    return Heard(first, time.perf_counter() - began, samples / RATE, stall)


async def measure(runs: int) -> dict[str, float]:
    service = assemble(Settings(), load_plugins(), [polymux_starter.SPEAK.name], print)
    gateway = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1)
    listener = bind_socket(gateway)
    server = Server(create_app(service, gateway), service)
    serving = asyncio.create_task(server.run_until_stopped(listener))
    while not (server.started and service.ready):
        await asyncio.sleep(0.05)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{listener.getsockname()[1]}", timeout=600) as client:
        await listen(client, "Warm up.")
        long = (STORY * 12)[:4000]
        firsts = [(await listen(client, long)).first for _ in range(runs)]
        rounds = [await asyncio.gather(*(listen(client, STORY * 3) for _ in range(STREAMS))) for _ in range(runs)]
    server.should_exit = True
    await serving
    streams = [heard for round in rounds for heard in round]
    paces = [sum(heard.sound for heard in round) / max(heard.total for heard in round) for round in rounds]
    return {
        "first_ms": statistics.median(firsts) * 1e3,
        "worst_first_ms": max(firsts) * 1e3,
        "slowest": max(heard.total / heard.sound for heard in streams),
        "streams_first_ms": max(heard.first for heard in streams) * 1e3,
        "stall_ms": max(heard.stall for heard in streams) * 1e3,
        "sound_per_second": statistics.median(paces),
    }


def measure_package(runs: int) -> tuple[float, float, float]:
    """The package alone: milliseconds to its first sentence; seconds of sound a second when every core speaks, and
    milliseconds until the last of the texts is heard then."""
    voice = Hibari()
    voice("Warm up.")
    firsts = []
    for _ in range(runs):
        began = time.perf_counter()
        next(iter(voice.stream((STORY * 12)[:4000])))
        firsts.append(time.perf_counter() - began)
    ways = [measure_pace(voice, runs), measure_pace(Hibari(threads=1), runs)]
    return statistics.median(firsts) * 1e3, max(pace for pace, _ in ways), min(last for _, last in ways)


def measure_pace(voice: Hibari, runs: int) -> tuple[float, float]:
    paces, lasts = [], []
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as cores:
        for _ in range(runs + 1):
            began = time.perf_counter()
            said = list(cores.map(partial(say, voice, began), [STORY * 3] * STREAMS))
            paces.append(sum(samples for samples, _ in said) / RATE / (time.perf_counter() - began))
            lasts.append(max(first for _, first in said))
    return statistics.median(paces[1:]), max(lasts[1:]) * 1e3


def say(voice: Hibari, began: float, text: str) -> tuple[int, float]:
    """Samples of the text, and when its first sentence was there."""
    sentences = iter(voice.stream(text))
    samples = len(next(sentences))
    first = time.perf_counter() - began
    return samples + sum(map(len, sentences)), first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="append the figures to the ledger")
    args = parser.parse_args()
    found = asyncio.run(measure(args.runs))
    first, pace, last = measure_package(args.runs)
    print({name: round(value, 3) for name, value in found.items()})
    print(f"package: {first:.0f} ms, {pace:.1f} s/s, {last:.0f} ms to the last of {STREAMS}")
    if args.write:
        peer = "hibari-tts alone, in process"
        record(
            "speech",
            "starter/speak over HTTP, 4,000 characters, time to first audio",
            found["first_ms"],
            "ms",
            peer=peer,
            peer_value=first,
        )
        record(
            "speech",
            f"starter/speak over HTTP, {STREAMS} texts at once, sound made a second",
            found["sound_per_second"],
            "s/s",
            peer=f"{peer}, a thread for each core",
            peer_value=pace,
        )
        record(
            "speech",
            f"starter/speak over HTTP, {STREAMS} texts at once, time to first audio, worst",
            found["streams_first_ms"],
            "ms",
            peer=f"{peer}, a thread for each core",
            peer_value=last,
        )
        record(
            "speech",
            f"starter/speak over HTTP, {STREAMS} texts at once, time a second of sound takes, slowest",
            found["slowest"],
            "s",
        )


if __name__ == "__main__":
    main()
