"""Speech written down while it lasts, on this machine's CPU: sockets of the official client, in real time.

Each socket sends sentences that a voice has spoken, 100 ms at a time by the wall clock, and lets the server find where
they begin and end (500 ms of silence). Lateness counts from where the sound itself begins and ends. The same sound as
files gives the error rate that streaming is compared with.

On a machine that others use too: `chrt -f 5 python benchmarks/realtime.py --record`; the results say so.

    python benchmarks/realtime.py [--sockets 4] [--sentences 3] [--record]
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import io
import os
import re
import socket
import subprocess
import sys
import time
import wave
from dataclasses import dataclass, field
from typing import Any

import hibari
import numpy as np
import openai
from ledger import describe_cpu, record

RATE = 24_000
CHUNK = RATE // 10
LOUD = 0.02
MODEL = "starter/transcribe"
GAP = np.zeros(int(1.2 * RATE), np.float32)
SENTENCES = [
    "The morning train was late, so the students walked to school together.",
    "A gardener planted apple trees behind the old stone house.",
    "Nobody remembered where the captain had hidden his silver watch.",
    "Rain fell on the quiet harbor while the women repaired their nets.",
    "The teacher asked a simple question, and every hand went up at once.",
    "We bought fresh bread, a piece of cheese, and some bottles of water.",
    "Her brother plays the violin in a small orchestra near the river.",
    "After dinner, they sat by the fire and listened to the wind.",
    "The museum opens in the morning and closes in the evening.",
    "In the end, the tired travelers reached the top of the mountain.",
    "Please send the letter to my sister before the end of the week.",
    "The doctor told him to drink more water and sleep a little longer.",
]


@dataclass
class Utterance:
    """A sentence in its socket's sound: where it is loud first and last, in seconds."""

    text: str
    begin: float
    end: float
    first: float | None = None
    last: float | None = None
    """When its first and last words came, in seconds since the socket's sound began."""


@dataclass
class Stream:
    """What one socket sends, and what came back."""

    sound: np.ndarray
    utterances: list[Utterance] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    closed: bool = False


def make_stream(voice: Any, texts: list[str], seed: int) -> Stream:
    pieces, place = [GAP[: RATE // 2]], RATE // 2
    utterances = []
    for text in texts:
        said = np.concatenate(list(voice.stream(text)))
        loud = np.flatnonzero(np.abs(said) > LOUD)
        utterances.append(Utterance(text, (place + loud[0]) / RATE, (place + loud[-1]) / RATE))
        pieces += [said, GAP]
        place += len(said) + len(GAP)
    sound = np.concatenate(pieces)
    noise = np.random.default_rng(seed).normal(0, 1e-4, len(sound)).astype(np.float32)
    return Stream(sound + noise, utterances)


async def talk(client: openai.AsyncOpenAI, stream: Stream, delay: float) -> None:
    """Send in real time and note when words come."""
    await asyncio.sleep(delay)
    async with client.realtime.connect(model=MODEL, extra_query={"intent": "transcription"}) as connection:
        begin = time.perf_counter()
        reader = asyncio.create_task(listen(connection, stream, begin))
        data = (np.clip(stream.sound, -1, 1) * 32767).astype("<i2")
        for place in range(0, len(data), CHUNK):
            await asyncio.sleep(max(0.0, begin + (place + CHUNK) / RATE - time.perf_counter()))
            audio = base64.b64encode(data[place : place + CHUNK].tobytes()).decode()
            await connection.input_audio_buffer.append(audio=audio)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(reader, 60)


async def listen(connection: Any, stream: Stream, begin: float) -> None:
    items: dict[str, Utterance] = {}
    try:
        while len(stream.heard) < len(stream.utterances):
            event = await connection.recv()
            now = time.perf_counter() - begin
            if event.type == "input_audio_buffer.speech_started":
                items[event.item_id] = min(
                    stream.utterances, key=lambda each: abs(each.begin - event.audio_start_ms / 1000)
                )
            elif event.type.endswith("transcription.delta") and items[event.item_id].first is None:
                items[event.item_id].first = now
            elif event.type.endswith("transcription.completed"):
                items[event.item_id].last = now
                stream.heard.append(event.transcript)
            elif event.type == "error":
                raise RuntimeError(event.error.message)
    except Exception as error:
        stream.closed = True
        print("closed:", error)


async def transcribe(client: openai.AsyncOpenAI, sound: np.ndarray) -> str:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes((np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes())
    answer = await client.audio.transcriptions.create(model=MODEL, file=("sound.wav", file.getvalue()))
    return answer.text


def spell(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def count_errors(said: list[str], heard: list[str]) -> int:
    """Words to change, add or leave out (Levenshtein)."""
    row = list(range(len(heard) + 1))
    for place, word in enumerate(said):
        above, row = row, [place + 1]
        for column, other in enumerate(heard):
            row.append(min(above[column] + (word != other), above[column + 1] + 1, row[-1] + 1))
    return row[-1]


@contextlib.contextmanager
def serve() -> Any:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "polymux", "serve", MODEL, "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        process.wait(60)


async def wait_ready(url: str) -> None:
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        for _ in range(600):
            with contextlib.suppress(openai.APIError):
                await client.audio.transcriptions.create(model=MODEL, file=("a.wav", silence()))
                return
            await asyncio.sleep(0.2)
    raise RuntimeError("the server did not get ready")


def silence() -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(bytes(RATE))
    return file.getvalue()


async def measure(url: str, streams: list[Stream]) -> dict[str, tuple[float, str]]:
    await wait_ready(url)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", timeout=600) as client:
        warm = Stream(streams[0].sound[: 3 * RATE], streams[0].utterances[:0])
        await talk(client, warm, 0.0)
        await asyncio.gather(*(talk(client, stream, place * 0.37) for place, stream in enumerate(streams)))
        whole = [await transcribe(client, stream.sound) for stream in streams]
    everything = [utterance for stream in streams for utterance in stream.utterances]
    first = [each.first - each.begin for each in everything if each.first is not None]
    last = [each.last - each.end for each in everything if each.last is not None]
    said = [spell(" ".join(each.text for each in stream.utterances)) for stream in streams]
    words = sum(map(len, said))
    live = sum(count_errors(a, spell(" ".join(stream.heard))) for a, stream in zip(said, streams)) / words
    offline = sum(count_errors(a, spell(text)) for a, text in zip(said, whole)) / words
    return {
        "sockets that were not closed": (sum(not stream.closed for stream in streams), "sockets"),
        "utterances written down": (len(last), f"of {len(everything)}"),
        "first words after speech begins, worst": (max(first), "s"),
        "last words after its end, worst": (max(last), "s"),
        "first words after speech begins, median": (float(np.median(first)), "s"),
        "last words after its end, median": (float(np.median(last)), "s"),
        "word error rate while it lasts": (100 * live, "%"),
        "word error rate of the same sound as files": (100 * offline, "%"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sockets", type=int, default=4)
    parser.add_argument("--sentences", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    voice = hibari.Hibari()
    streams = []
    for number in range(arguments.sockets):
        texts = [SENTENCES[(number * arguments.sentences + k) % len(SENTENCES)] for k in range(arguments.sentences)]
        streams.append(make_stream(voice, texts, number))
    with serve() as url:
        figures = asyncio.run(measure(url, streams))
    first = os.sched_getscheduler(0) == os.SCHED_FIFO
    hardware = describe_cpu() + (", scheduled first" if first else "")
    for metric, (value, unit) in figures.items():
        print(f"{arguments.sockets} sockets, {metric}: {value:.2f} {unit}")
        if arguments.record:
            record("realtime", f"{arguments.sockets} sockets, {metric}", value, unit, hardware=hardware)


if __name__ == "__main__":
    main()
