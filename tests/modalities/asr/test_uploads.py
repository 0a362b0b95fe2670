"""Long uploads to starter/transcribe: worked on while they arrive, in memory that does not grow with their length."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import httpx
import numpy as np
import psutil
import pytest

from polymux.core.testing.media import write_wav

hibari = pytest.importorskip("hibari", reason="pip install hibari-tts")

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

RATE = 16_000
SENTENCE = "The quick brown fox jumps over the lazy dog."
HOURS = 2
ALLOWED = 300 << 20


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, int]]:
    """The command as people run it: its address and its process."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "polymux", "serve", "starter/transcribe", "--port", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture(scope="module")
async def client(server: tuple[str, int]) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=server[0], timeout=600) as client:
        async with asyncio.timeout(240):
            while True:
                with suppress(httpx.TransportError):
                    if (await client.get("/readyz")).status_code == 200:
                        break
                await asyncio.sleep(0.2)
        yield client


def weigh(pid: int) -> int:
    """Bytes that a process and its children hold for themselves."""
    found = 0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            found += process.memory_full_info().uss
    return found


def begin_wav(seconds: int) -> bytes:
    """The header of a WAV file that long."""
    header = bytearray(write_wav(np.zeros(1, np.float32), RATE)[:44])
    header[4:8] = (36 + 2 * RATE * seconds).to_bytes(4, "little")
    header[40:44] = (2 * RATE * seconds).to_bytes(4, "little")
    return bytes(header)


def write_body(parts: Iterator[bytes]) -> Iterator[bytes]:
    for name, value in {"model": "whisper-1", "stream": "true", "include[]": "progress"}.items():
        yield f'--b\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
    yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="long.wav"\r\n\r\n'
    yield from parts
    yield b"\r\n--b--\r\n"


async def send(client: httpx.AsyncClient, parts: Iterator[bytes]) -> list[dict]:
    """The events of the answer."""

    async def pieces() -> AsyncIterator[bytes]:
        for part in write_body(parts):
            yield part

    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await client.post("/v1/audio/transcriptions", content=pieces(), headers=headers)
    assert answer.status_code == 200, answer.text
    return [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]


async def test_two_hours_take_no_more_memory_than_a_minute(
    client: httpx.AsyncClient, server: tuple[str, int], record_property
) -> None:
    """A sentence every ten minutes, silence between: each is written down at its place, and nothing else is."""
    said = np.concatenate(list(hibari.Hibari().stream(SENTENCE)))
    said = np.interp(np.arange(0, len(said), 1.5), np.arange(len(said)), said)
    spoken = (np.clip(said, -1, 1) * 32767).astype("<i2").tobytes()
    minute = bytes(2 * RATE * 60)

    def speak(minutes: int) -> Iterator[bytes]:
        yield begin_wav(60 * minutes)
        for number in range(minutes):
            yield spoken + minute[len(spoken) :] if number % 10 == 0 else minute

    assert (await send(client, speak(1)))[-1]["text"] == SENTENCE
    before = weigh(server[1])
    heaviest = before

    async def watch() -> None:
        nonlocal heaviest
        while True:
            await asyncio.sleep(0.5)
            heaviest = max(heaviest, await asyncio.to_thread(weigh, server[1]))

    watching = asyncio.create_task(watch())
    events = await send(client, speak(60 * HOURS))
    watching.cancel()
    grown = heaviest - before
    record_property("grown", grown)
    print(f"{HOURS} hours: {grown / (1 << 20):.0f} MiB more")
    assert grown < ALLOWED
    sentences = re.findall(r"[^.]+\.", events[-1]["text"])
    assert [sentence.strip() for sentence in sentences] == [SENTENCE] * 6 * HOURS
    progress = [event["seconds"] for event in events if event["type"] == "transcript.progress"]
    assert len(progress) == 6 * HOURS and progress == sorted(progress)


async def test_two_hours_of_silence_say_nothing(client: httpx.AsyncClient) -> None:
    def keep_silent() -> Iterator[bytes]:
        yield begin_wav(3_600 * HOURS)
        for _ in range(60 * HOURS):
            yield bytes(2 * RATE * 60)

    assert [(event["type"], event.get("text")) for event in await send(client, keep_silent())] == [
        ("transcript.text.done", "")
    ]


async def test_fifty_megabytes_of_noise_say_nothing(client: httpx.AsyncClient) -> None:
    """As sound. As a file, they are no sound: 400."""
    random = np.random.default_rng(0)
    seconds = (50 << 20) // (2 * RATE)

    def hiss() -> Iterator[bytes]:
        yield begin_wav(seconds)
        for _ in range(seconds):
            yield (random.normal(0, 3_000, RATE)).astype("<i2").tobytes()

    assert (await send(client, hiss()))[-1]["text"] == ""
    files = {"file": ("noise.mp3", random.bytes(50 << 20))}
    answer = await client.post("/v1/audio/transcriptions", data={"model": "whisper-1"}, files=files)
    assert answer.status_code == 400 and answer.json()["error"]["code"] == "invalid_audio"
