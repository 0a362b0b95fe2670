"""A hundred clients at once, one server, and most of them up to no good: the good ones hear what they hear alone.

The server is the command that people run, with the starters. Some clients ask for speech in every format and way, some
leave on the way, some send nonsense, and some talk on sockets: cancelled, cut short, interrupted, in half samples. The
same crowd comes twice, and the second time leaves nothing behind that the first did not.
"""

from __future__ import annotations

import asyncio
import base64
import io
import itertools
import json
import re
import socket
import struct
from collections.abc import AsyncIterator, Awaitable
from contextlib import AbstractAsyncContextManager
from typing import Any

import av
import httpx
import numpy as np
import pytest

from polymux.core.testing.command import Running, run_server
from polymux.core.testing.talk import Talk, open_talk
from polymux.core.text.sentences import split_sentences

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.timeout(900)]

FORMATS = ("wav", "pcm", "mp3", "opus", "aac", "flac")
SENTENCES = (
    "The morning train was late, so the students walked to school together.",
    "Rain fell on the quiet harbor. The fishermen repaired their nets!",
    "Hi.",
)
QUESTION = "What is the capital of France?"
LONG = "A gardener planted seven apple trees behind the old stone house. " * 30
GOOD: list[dict[str, Any]] = [
    {"input": text, "response_format": format, "speed": speed, **way}
    for number, (format, way) in enumerate(
        itertools.product(FORMATS, [{}, {"stream": False}, {"stream_format": "sse"}])
    )
    for text, speed in [(SENTENCES[number % 3], (1.0, 0.5, 4.0)[number // 3 % 3]), (SENTENCES[(number + 1) % 3], 1.25)]
]
"""Thirty-six ways to be spoken to."""

BAD: list[tuple[dict[str, Any] | bytes, int]] = [
    ({"input": ""}, 400),
    ({"input": "😀🎉"}, 400),
    ({"input": "日本語"}, 400),
    ({"input": "x" * 20_001}, 400),
    ({"input": None}, 400),
    ({"input": "\x00\x01"}, 400),
    ({"speed": 0}, 400),
    ({"speed": -1}, 400),
    ({"speed": 99}, 400),
    ({"speed": "fast"}, 400),
    ({"speed": 1e308}, 400),
    ({"response_format": "midi"}, 400),
    ({"stream_format": "websocket"}, 400),
    ({"voice": "nobody"}, 400),
    ({"model": "starter/embed"}, 400),
    ({"model": "nobody"}, 404),
    ({"input": "<speak>", "input_type": "ssml"}, 400),
    ({"input": "<speak><audio src='file:///etc/passwd'/></speak>", "input_type": "ssml"}, 400),
    ({"input": "<speak><break time='99999s'/></speak>", "input_type": "ssml"}, 400),
    ({"input": "<speak><prosody rate='1e9'>x</prosody></speak>", "input_type": "ssml"}, 400),
    ({"input": '<!DOCTYPE s [<!ENTITY a "b">]><speak>&a;</speak>', "input_type": "ssml"}, 400),
    ({"input": "<speak>" * 2_000, "input_type": "ssml"}, 400),
    (b'{"model": "tts-1", "input": "Hi.", "speed": NaN}', 400),
    (b'{"model": "tts-1", "input": "\\ud83d"}', 400),
    (b"[" * 100_000, 400),
    (b"\xff\xfe\x00", 400),
    (b"", 400),
]
FRAMES = [
    "{",
    "[1]",
    b"\0\1\2",
    "[" * 100_000,
    '{"type": NaN}',
    {"type": "session.explode"},
    {"type": "input_audio_buffer.append", "audio": "****"},
    {"type": "input_audio_buffer.append", "audio": 1},
    {"type": "response.cancel"},
    {"type": "conversation.item.truncate", "item_id": "x", "content_index": 0, "audio_end_ms": -1},
    {"type": "session.update", "session": {"audio": {"output": {"speed": 99}}}},
]
"""What no socket should be sent; each is an error, and the socket lives on."""


class Server:
    """The running command: what it says, what it counts."""

    def __init__(self, running: Running) -> None:
        self.running = running
        self.url = running.url
        self.client = httpx.AsyncClient(base_url=self.url, timeout=300, limits=httpx.Limits(max_connections=None))

    async def read_metrics(self) -> dict[str, float]:
        lines = (await self.client.get("/metrics")).text.splitlines()
        return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line[0] != "#")}

    async def come_to_rest(self) -> dict[str, float]:
        """The metrics, once nobody is served any more."""
        busy = re.compile(r"polymux_(num_requests_(running|waiting)|engine_(jobs|rows)_(running|waiting))\b")
        async with asyncio.timeout(60):
            while True:
                found = await self.read_metrics()
                if not any(value for name, value in found.items() if busy.match(name)):
                    return found
                await asyncio.sleep(0.2)

    async def speak(self, **asked: Any) -> bytes:
        answer = await self.client.post("/v1/audio/speech", json={"model": "tts-1", **asked})
        assert answer.status_code == 200, answer.text
        if asked.get("stream_format") != "sse":
            return answer.content
        frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame]
        assert frames[-1] == "[DONE]"
        *deltas, done = map(json.loads, frames[:-1])
        assert done["type"] == "speech.audio.done" and done["receipt"]["sound_seconds"] > 0
        return b"".join(base64.b64decode(delta["audio"]) for delta in deltas)

    def talk(self, query: str) -> AbstractAsyncContextManager[Talk]:
        return open_talk(self.url, query)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    models = [f"starter/{name}" for name in ("chat", "embed", "transcribe", "speak")]
    with run_server(tmp_path_factory.mktemp("server"), *models) as running:
        yield Server(running)
        assert "Traceback" not in running.log.read_text(), running.log.read_text()


def decode(format: str, data: bytes) -> np.ndarray:
    """As a player gets it."""
    if format == "pcm":
        return np.frombuffer(data, "<i2")
    with av.open(io.BytesIO(data)) as container:
        return np.concatenate([frame.to_ndarray().ravel() for frame in container.decode(audio=0)])


async def listen(server: Server, asked: dict[str, Any]) -> np.ndarray:
    return decode(asked["response_format"], await server.speak(**asked))


async def be_refused(server: Server, body: dict[str, Any] | bytes, status: int) -> None:
    """Refused in words, also where the body is no request at all."""
    content = body if isinstance(body, bytes) else json.dumps({"model": "tts-1", "input": "Hi.", **body}).encode()
    answer = await server.client.post("/v1/audio/speech", content=content, headers={"content-type": "application/json"})
    assert (answer.status_code, bool(answer.json()["error"]["message"])) == (status, True), (body, answer.text)


async def leave(server: Server, format: str, rudely: bool) -> None:
    """Goes with the first sound; rudely, the connection is torn down at once."""
    body = json.dumps({"model": "tts-1", "input": LONG, "response_format": format}).encode()
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    writer.write(head.encode() + b"\r\n\r\n" + body)
    assert (await reader.readline()).split()[1] == b"200"
    if rudely:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        writer.transport.abort()
    writer.close()


async def send_half_a_request(server: Server) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(b'POST /v1/audio/speech HTTP/1.1\r\nHost: x\r\nContent-Length: 99\r\n\r\n{"model":')
    await writer.drain()
    writer.close()


async def be_read_to(server: Server, text: str) -> bytes:
    """A voice as a socket's model says what it is given, after nonsense too."""
    async with server.talk("model=starter/speak") as talk:
        for frame in FRAMES:
            await talk.connection.send(json.dumps(frame) if isinstance(frame, dict) else frame)
            assert json.loads(await talk.connection.recv())["type"] == "error", frame
        await talk.ask(text)
        assert (await talk.until("response.done"))["response"]["status"] == "completed"
        return talk.sound


async def stop_in_the_middle(server: Server, truncate: bool) -> None:
    async with server.talk("model=starter/speak") as talk:
        await talk.ask(LONG)
        delta = await talk.until("response.output_audio.delta")
        if truncate:
            place = {"item_id": delta["item_id"], "content_index": 0, "audio_end_ms": len(talk.sound) // 48}
            await talk.send("conversation.item.truncate", **place)
        else:
            await talk.send("response.cancel")
        done = (await talk.until("response.done"))["response"]
        assert done["status_details"]["reason"] == "client_cancelled"
        said = done["output"][0]["content"][0]["transcript"]
        assert LONG.startswith(said.rstrip()) and len(said) < len(LONG)


async def walk_off(server: Server, sound: bytes = b"") -> None:
    """Asks for a long answer on a socket, or says more than anybody can listen to, and is gone."""
    async with server.talk("model=starter/speak") as talk:
        if sound:
            await talk.hear(sound * 60, 480_000)
        else:
            await talk.ask(LONG)
            await talk.until("response.output_audio.delta")
        talk.connection.transport.abort()


async def dictate(server: Server, sound: bytes, size: int) -> str:
    async with server.talk("intent=transcription&model=starter/transcribe") as talk:
        await talk.hear(sound, size)
        return (await talk.until("conversation.item.input_audio_transcription.completed"))["transcript"]


async def converse(server: Server, sound: bytes, interrupt: bool) -> None:
    """Question in, answer out: every sentence of it sounds as that sentence does alone. Or it is spoken over."""
    async with server.talk("model=starter/chat") as talk:
        audio = {"input": {"transcription": {"model": "starter/transcribe"}}, "output": {"model": "starter/speak"}}
        instructions = "Tell a very long story." if interrupt else "Answer in one short sentence."
        session = {"audio": audio, "instructions": instructions, "max_output_tokens": 400 if interrupt else 24}
        await talk.send("session.update", session=session)
        await talk.hear(sound, 4801)
        if interrupt:
            await talk.until("response.output_audio.delta")
            await talk.hear(sound, 4800)
            done = (await talk.until("response.done"))["response"]
            assert done["status"] in ("cancelled", "incomplete", "completed")
            return
        done = (await talk.until("response.done"))["response"]
        assert done["status"] in ("completed", "incomplete"), done
        said = done["output"][0]["content"][0]["transcript"]
        expected = b""
        for sentence in split_sentences(said):
            if re.search("[A-Za-z0-9]", sentence):
                expected += await server.speak(input=sentence, response_format="pcm")
        assert talk.sound == expected, said


async def come_all(server: Server, sound: bytes) -> list[Any]:
    """The hundred, at once. What the good ones heard, in order; anybody's complaint is raised."""
    good: list[Awaitable[Any]] = [
        *(listen(server, asked) for asked in GOOD),
        *(be_read_to(server, SENTENCES[number % 3]) for number in range(6)),
        *(dictate(server, sound, size) for size in (3, 4801, 96_000)),
    ]
    others: list[Awaitable[Any]] = [
        *(be_refused(server, body, status) for body, status in BAD),
        *(leave(server, format, rudely) for format in FORMATS for rudely in (False, True)),
        *(stop_in_the_middle(server, truncate) for truncate in (False, True, False, True)),
        *(walk_off(server, spoken) for spoken in (b"", b"", sound)),
        *(send_half_a_request(server) for _ in range(5)),
        *(converse(server, sound, interrupt) for interrupt in (False, True, False, True)),
    ]
    assert len(good) + len(others) == 100
    heard = await asyncio.gather(*good, *others)
    return heard[: len(good)]


async def test_a_hundred_clients_and_nothing_is_lost(server: Server) -> None:
    spoken = np.frombuffer(await server.speak(input=QUESTION, response_format="pcm"), "<i2")
    silence = np.random.default_rng(0).integers(-3, 4, 24_000)
    sound = np.concatenate([silence[:12_000], spoken, silence]).astype("<i2").tobytes()
    await come_all(server, sound)
    await server.come_to_rest()
    before = server.running.weigh()

    together = await come_all(server, sound)
    metrics = await server.come_to_rest()
    assert metrics["polymux_engine_job_failures_total"] == 0

    alone = [
        *[await listen(server, asked) for asked in GOOD],
        *[await be_read_to(server, SENTENCES[number % 3]) for number in range(6)],
        *[await dictate(server, sound, size) for size in (3, 4801, 96_000)],
    ]
    for number, (one, two) in enumerate(zip(together, alone, strict=True)):
        assert np.array_equal(one, two), f"number {number} did not hear what it hears alone"
    assert {text for text in together[-3:]} == {QUESTION}

    after = server.running.weigh()
    print(before, after)
    assert after["MiB"] - before["MiB"] < 128, "more than a few pages of the cache, which were never used before"
    assert after["threads"] < 80, "pools grow as they are used, to a bound"
    assert after["descriptors"] - before["descriptors"] <= 4
