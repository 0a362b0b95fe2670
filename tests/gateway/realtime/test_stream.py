"""/v1/audio/stream: raw sound in, lines out, over a socket and over a POST that is answered while it arrives."""

from __future__ import annotations

import asyncio
import json

import httpx
import numpy as np
import pytest
import websockets

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def sound(seconds: float, level: float = 0.0, rate: int = 16_000) -> bytes:
    return np.full(int(seconds * rate), int(level * 32767), "<i2").tobytes()


async def test_a_post_is_answered_while_it_arrives(fake, serving):
    """As curl does it with `-T -`: both directions at once, on one plain connection."""
    async with serving(fake) as running:
        reader, writer = await asyncio.open_connection(*running.url.removeprefix("http://").split(":"))

        def send(data: bytes) -> None:
            writer.write(b"%x\r\n%b\r\n" % (len(data), data))

        writer.write(b"POST /v1/audio/stream?rate=16000 HTTP/1.1\r\nhost: here\r\ntransfer-encoding: chunked\r\n\r\n")
        send(sound(0.3, 0.5))
        early = b""
        while b'"start"' not in early:  # the first line is there before the body is
            early += await asyncio.wait_for(reader.read(1000), 120)
        assert early.startswith(b"HTTP/1.1 200") and b"application/x-ndjson" in early
        send(sound(0.5)[:-1])
        send(sound(0.5)[-1:])
        while b'"final"' not in early:
            early += await asyncio.wait_for(reader.read(1000), 120)
        send(sound(0.3, 0.5))
        writer.write(b"0\r\n\r\n")
        while not early.endswith(b"0\r\n\r\n"):
            early += await asyncio.wait_for(reader.read(1000), 120)
        writer.close()
        lines = [json.loads(line) for line in early.split(b"\r\n") if line.startswith(b"{")]
        assert [line["type"] for line in lines] == [
            "start", "delta", "stop", "delta", "final", "start", "delta", "delta", "final",
        ]  # fmt: skip
        assert [line["text"] for line in lines if line["type"] == "final"] == ["! 0.8 seconds", "! 0.3 seconds"]


async def test_a_socket_takes_sound_and_two_words(fake, serving):
    async with serving(fake) as running:
        url = running.url.replace("http", "ws")
        async with websockets.connect(f"{url}/v1/audio/stream?format=mulaw&model=ear") as socket:
            await socket.send(b"\x00" * 2400)
            await socket.send("commit")
            await socket.send("what?")
            await socket.send(b"\x00" * 1600)
            await socket.send("end")
            lines = [json.loads(line) async for line in socket]
        assert socket.close_code == 1000
        assert [line["text"] for line in lines if line["type"] == "final"] == ["! 0.3 seconds", "! 0.2 seconds"]
        assert [line["type"] for line in lines].count("error") == 1


@pytest.mark.parametrize("query", ["rate=0", "rate=nan", "format=mp3", "model=chat", "model=nobody", "speed=1"])
async def test_what_is_wrong_is_said_before_any_sound(fake, serving, query):
    async with serving(fake) as running:
        async with httpx.AsyncClient() as client:
            answer = await client.post(f"{running.url}/v1/audio/stream?{query}", content=b"")
        assert answer.status_code == (404 if "nobody" in query else 400)
        assert answer.json()["error"]["param"] == query.partition("=")[0]
        async with websockets.connect(f"{running.url.replace('http', 'ws')}/v1/audio/stream?{query}") as socket:
            assert json.loads(await socket.recv())["type"] == "error"
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008


async def test_leaving_stops_the_work(fake, serving):
    async with serving(fake) as running:
        url = running.url.replace("http", "ws")
        async with websockets.connect(f"{url}/v1/audio/stream") as socket:
            await socket.send(sound(0.3, 0.5))
            await socket.recv()
            assert fake.running == 1
        for _ in range(1000):
            if not fake.running:
                break
            await asyncio.sleep(0.01)
        assert not fake.running
