"""`/v1/audio/speech`: what a request means, sound piece by piece, refusals that name the field, clients that leave."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.tasks import Done, Sound, Speak
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.receipts import KEPT, PER_REQUEST, Entry, Receipts

pytestmark = pytest.mark.anyio

PIECE = np.arange(2400, dtype="<i2").tobytes()


@pytest.fixture
def service() -> FakeService:
    async def speak(served: Any, task: str, ask: Speak) -> AsyncIterator[Any]:
        for _ in ask.text.split():
            yield Sound(PIECE, 24_000)
        yield Done(Usage(7, 24, seconds=0.1), Receipt(first_ms=1.0))

    return FakeService((FakeServed("voice", ("speak",), aliases=("tts-1",)), FakeServed("stub")), script=speak)


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tts-1", "input": "one two", "voice": "alloy", "response_format": "wav", **more}


async def test_what_is_asked(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await client.post("/v1/audio/speech", json=ask(voice={"id": "emma"}, speed=2))).status_code == 200
    assert service.opened[0].ask == Speak(text="one two", voice="emma", speed=2.0)
    assert (await client.post("/v1/audio/speech", json={"model": "voice", "input": "x"})).status_code == 200
    assert service.opened[1].ask == Speak(text="x")
    fields = {"input_type": "ssml", "seed": 7}
    assert (await client.post("/v1/audio/speech", json=ask(**fields))).status_code == 200
    assert service.opened[2].ask == Speak(text="one two", voice="alloy", kind="ssml", seed=7)


@pytest.mark.parametrize(
    ("format", "media"),
    [
        (None, "audio/mpeg"),
        ("mp3", "audio/mpeg"),
        ("opus", "audio/ogg"),
        ("aac", "audio/aac"),
        ("flac", "audio/flac"),
        ("wav", "audio/wav"),
        ("pcm", "audio/pcm"),
    ],
)
async def test_formats(client: httpx.AsyncClient, format: str | None, media: str) -> None:
    answer = await client.post("/v1/audio/speech", json=ask(response_format=format))
    assert answer.headers["content-type"] == media
    assert "content-length" not in answer.headers
    whole = await client.post("/v1/audio/speech", json=ask(response_format=format, stream=False))
    assert int(whole.headers["content-length"]) == len(whole.content) > 100
    if format == "wav":
        assert answer.content[44:] == whole.content[44:] == PIECE * 2
        assert answer.content.count(b"RIFF") == 1
    if format == "pcm":
        assert answer.content == PIECE * 2


async def test_events(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/audio/speech", json=ask(stream_format="sse", response_format="pcm"))
    frames = [frame.removeprefix("data: ") for frame in answer.text.split("\n\n") if frame]
    assert frames[-1] == "[DONE]"
    *deltas, done = [json.loads(frame) for frame in frames[:-1]]
    assert [delta["type"] for delta in deltas] == ["speech.audio.delta"] * 2
    assert b"".join(base64.b64decode(delta["audio"]) for delta in deltas) == PIECE * 2
    assert done["type"] == "speech.audio.done"
    assert done["usage"] == {"type": "tokens", "input_tokens": 7, "output_tokens": 24, "total_tokens": 31}
    assert done["receipt"]["first_ms"] == 1.0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": ""}, "input"),
        ({"input": "x" * 20_001}, "input"),
        ({"input": None}, "input"),
        ({"voice": 5}, "voice"),
        ({"voice": {"name": "x"}}, "voice.id"),
        ({"speed": 0}, "speed"),
        ({"speed": 0.2}, "speed"),
        ({"speed": 99}, "speed"),
        ({"speed": "1"}, "speed"),
        ({"response_format": "mid"}, "response_format"),
        ({"stream_format": "chunks"}, "stream_format"),
        ({"instructions": "whisper"}, "instructions"),
        ({"input_type": "html"}, "input_type"),
        ({"seed": -1}, "seed"),
        ({"seed": 1 << 63}, "seed"),
        ({"pitch": 2}, "pitch"),
        ({"stream": False, "stream_format": "sse"}, None),
        ({"model": "stub"}, "model"),
    ],
)
async def test_refusals_name_the_field(client: httpx.AsyncClient, fields: dict[str, Any], param: str | None) -> None:
    answer = await client.post("/v1/audio/speech", json=ask(**fields))
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


async def test_not_a_number(client: httpx.AsyncClient) -> None:
    body = json.dumps(ask(speed=float("nan")))
    answer = await client.post("/v1/audio/speech", content=body, headers={"content-type": "application/json"})
    assert answer.status_code == 400


async def test_the_voices_own_refusal_has_its_status(client: httpx.AsyncClient, service: FakeService) -> None:
    async def refuse(served: Any, task: str, ask: Speak) -> AsyncIterator[Any]:
        raise InvalidRequest("there is no voice 'x'", param="voice")
        yield

    service.script = refuse
    answer = await client.post("/v1/audio/speech", json=ask())
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "voice")


async def test_a_failure_on_the_way_is_no_success(service: FakeService, serving: Any) -> None:
    """A file that was cut is seen to be cut; an event stream says why."""

    async def fail(served: Any, task: str, ask: Speak) -> AsyncIterator[Any]:
        yield Sound(PIECE, 24_000)
        raise InternalError("the voice broke")

    service.script = fail
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        with pytest.raises(httpx.RemoteProtocolError):
            await client.post("/v1/audio/speech", json=ask())
        answer = await client.post("/v1/audio/speech", json=ask(stream_format="sse"))
        assert "the voice broke" in answer.text
        assert "speech.audio.done" not in answer.text


@pytest.mark.parametrize("format", ["wav", "mp3"])
async def test_a_client_that_leaves_stops_the_voice(service: FakeService, serving: Any, format: str) -> None:
    async def endless(served: Any, task: str, ask: Speak) -> AsyncIterator[Any]:
        while True:
            yield Sound(PIECE, 24_000)
            await asyncio.sleep(0.01)

    service.script = endless
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        async with client.stream("POST", "/v1/audio/speech", json=ask(response_format=format)) as answer:
            await anext(answer.aiter_bytes())
        async with asyncio.timeout(2):
            while service.running:
                await asyncio.sleep(0.01)
    assert service.cancelled == 1


async def test_the_official_client(service: FakeService, serving: Any) -> None:
    async with (
        serving(service) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client,
    ):
        whole = await client.audio.speech.create(model="tts-1", voice="alloy", input="one two three")
        assert whole.content
        asked: dict[str, Any] = {"model": "tts-1", "voice": "nova", "input": "a b", "response_format": "pcm"}
        async with client.audio.speech.with_streaming_response.create(**asked) as answer:
            assert b"".join([part async for part in answer.iter_bytes()]) == PIECE * 2
        with pytest.raises(openai.BadRequestError) as refused:
            await client.audio.speech.create(model="tts-1", voice="alloy", input="x", speed=9)
        assert refused.value.param == "speed"


async def test_what_sound_cost_is_known_by_its_id(client: httpx.AsyncClient) -> None:
    """A file cannot say it. Streamed or whole, with an id of the client's own or of ours."""
    for more in ({}, {"stream": False}):
        answer = await client.post("/v1/audio/speech", json=ask(**more))
        told = (await client.get(f"/v1/receipts/{answer.headers['x-request-id']}")).json()
        (entry,) = told["data"]
        assert (entry["model"], entry["task"], entry["receipt"]["first_ms"]) == ("voice", "speak", 1.0)
    await client.post("/v1/audio/speech", json=ask(), headers={"x-request-id": "a/b"})
    await client.post("/v1/audio/speech", json=ask(), headers={"x-request-id": "a/b"})
    assert len((await client.get("/v1/receipts/a/b")).json()["data"]) == 2
    missing = await client.get("/v1/receipts/nobody")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")


def test_old_receipts_are_forgotten() -> None:
    receipts = Receipts()
    for number in range(KEPT + 1):
        for _ in range(PER_REQUEST + 1):
            receipts.keep(str(number), Entry("voice", "speak", Receipt()))
    assert [len(receipts.find(id)) for id in ("0", "1", str(KEPT))] == [0, PER_REQUEST, PER_REQUEST]
