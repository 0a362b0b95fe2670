"""Transcriptions: every format says the same, forms are strict, uploads are bounded and leave nothing behind."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymux.core.arrival import ArrivingFile
from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Done, Heard, Segment, TextDelta, Transcribe
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Usage

pytestmark = pytest.mark.anyio

PATH = "/v1/audio/transcriptions"
SAID = [" Hello & welcome.", " Is 1 <2?"]


async def speak(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
    """Two segments, and how much was uploaded."""
    size = Path(ask.audio).stat().st_size
    for number, text in enumerate(SAID):
        text = text.lstrip() if not number else text
        yield TextDelta(0, text)
        yield Segment(number, 3661.5 * number, 3661.5 * number + 1.25, text, [1, 2], 0, 0.0, -0.1, 1.0, 0.01)
    yield Heard("english", 3700.0)
    yield Done(Usage(input_tokens=1, output_tokens=size, seconds=3700.0), Receipt())


async def keep_silent(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
    yield Heard("english", 2.0)
    yield Done(Usage(seconds=2.0), Receipt())


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeService:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return FakeService((FakeServed("stub", ("transcribe", "translate")),), script=speak)


async def send(client: httpx.AsyncClient, path: str = PATH, file: bytes = b"sound", **fields: Any) -> httpx.Response:
    return await client.post(path, data={"model": "stub", **fields}, files={"file": ("a.wav", file)})


async def test_all_formats_say_the_same(client: httpx.AsyncClient) -> None:
    text = (await send(client)).json()["text"]
    assert text == "Hello & welcome. Is 1 <2?"
    plain = await send(client, response_format="text")
    assert (plain.text, plain.headers["content-type"]) == (text, "text/plain; charset=utf-8")
    verbose = (await send(client, response_format="verbose_json")).json()
    assert verbose["text"] == text == "".join(segment["text"] for segment in verbose["segments"])
    assert (verbose["task"], verbose["language"], verbose["duration"]) == ("transcribe", "english", 3700.0)
    srt = (await send(client, response_format="srt")).text
    assert srt == (
        "1\n00:00:00,000 --> 00:00:01,250\nHello & welcome.\n\n2\n01:01:01,500 --> 01:01:02,750\nIs 1 <2?\n\n"
    )
    vtt = (await send(client, response_format="vtt")).text
    assert vtt == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nHello &amp; welcome.\n\n01:01:01.500 --> 01:01:02.750\nIs 1 &lt;2?\n"
    )


async def test_events(client: httpx.AsyncClient) -> None:
    answer = await send(client, stream="true")
    frames = answer.text.removesuffix("\n\n").split("\n\n")
    assert frames[-1] == "data: [DONE]"
    events = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
    assert [event["type"] for event in events] == ["transcript.text.delta"] * 2 + ["transcript.text.done"]
    assert "".join(event["delta"] for event in events[:2]) == events[2]["text"]
    assert events[2]["usage"]["type"] == "tokens"


async def test_silence_is_empty_and_well(client: httpx.AsyncClient, service: FakeService) -> None:
    """speaches 608: no speech gave 500."""
    service.script = keep_silent
    assert (await send(client)).json()["text"] == ""
    assert (await send(client, response_format="srt")).text == ""
    assert (await send(client, response_format="vtt")).text == "WEBVTT\n"
    assert (await send(client, response_format="verbose_json")).json()["segments"] == []


@pytest.mark.parametrize("name", ["timestamp_granularities", "timestamp_granularities[]"])
async def test_plain_and_bracketed_names(client: httpx.AsyncClient, name: str) -> None:
    """speaches 29."""
    answer = await send(client, response_format="verbose_json", **{name: ["segment"]})
    assert answer.status_code == 200


async def test_fields_reach_the_task(client: httpx.AsyncClient, service: FakeService) -> None:
    await send(client, language="de", prompt="Grüße", temperature="0.5", chunking_strategy="auto")
    ask = service.opened[0].ask
    assert (ask.language, ask.prompt, ask.temperature, ask.seek) == ("de", "Grüße", 0.5, False)
    assert service.opened[0].task == "transcribe"
    await send(client, "/v1/audio/translations")
    assert service.opened[1].task == "translate"


async def test_how_a_recording_is_cut_reaches_the_task(client: httpx.AsyncClient, service: FakeService) -> None:
    chunking = {"type": "server_vad", "threshold": "0.4", "silence_duration_ms": "300", "prefix_padding_ms": "100"}
    await send(client, **{f"chunking_strategy[{key}]": value for key, value in chunking.items()})
    await send(client, condition_on_previous_text="true", hotwords="Polymux", best_of="3", beam_size="5")
    await send(client, chunking_strategy="seek", beam_size="1")
    first, second, third = (opened.ask for opened in service.opened)
    assert (first.threshold, first.silence, first.padding, first.seek) == (0.4, 0.3, 0.1, False)
    assert (second.remembers, second.hotwords, second.best_of, second.beam_size) == (True, "Polymux", 3, 5)
    assert (third.seek, third.remembers) == (True, False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "docx"}, "response_format"),
        ({"temperature": "nan"}, "temperature"),
        ({"temperature": "1.5"}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"stream": "maybe"}, "stream"),
        ({"keywords": "polymux"}, "keywords"),
        ({"beam_size": "0"}, "beam_size"),
        ({"beam_size": "17"}, "beam_size"),
        ({"chunking_strategy[type]": "server_vad", "chunking_strategy[threshold]": "2"}, "chunking_strategy.threshold"),
        ({"chunking_strategy": "auto", "condition_on_previous_text": "true"}, None),
        ({"chunking_strategy[type]": "semantic_vad"}, "chunking_strategy.type"),
        ({"stream": "true", "include[]": ["logprobs"]}, "include[0]"),
        ({"include[]": ["progress"]}, None),
        ({"language": ["en", "de"]}, "language"),
        ({"stream": "true", "response_format": "srt"}, None),
        ({"timestamp_granularities[]": ["segment"]}, None),
    ],
)
async def test_what_cannot_be_honoured_is_refused(
    client: httpx.AsyncClient, service: FakeService, fields: dict[str, Any], param: str | None
) -> None:
    answer = await send(client, **fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert not service.opened


async def test_the_file_must_be_one(client: httpx.AsyncClient) -> None:
    missing = await client.post(PATH, files={"model": (None, "stub")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "file")
    text = await client.post(PATH, files={"model": (None, "stub"), "file": (None, "sound")})
    assert (text.status_code, text.json()["error"]["param"]) == (400, "file")
    two = await client.post(PATH, data={"model": "stub"}, files=[("file", ("a", b"1")), ("file", ("b", b"2"))])
    assert two.status_code == 400


async def test_other_bodies_are_415(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json={"model": "stub"})).status_code == 415
    assert (await client.post(PATH, content=b"x", headers={"content-type": "multipart/form-data"})).status_code == 415


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"no boundary at all",
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\nstub',
        b"--b\r\nContent-Disposition: form-data\r\n\r\nstub\r\n--b--\r\n",
        b'--b\r\nContent-Disposition: form-data; name="model"\r\n\r\n\xff\xfe\r\n--b--\r\n',
        b"--b\r\n" + b"X: y\r\n" * 50 + b"\r\nstub\r\n--b--\r\n",
    ],
    ids=["empty", "no boundary", "cut off", "no name", "not UTF-8", "many headers"],
)
async def test_malformed_forms_are_400(client: httpx.AsyncClient, body: bytes) -> None:
    headers = {"content-type": "multipart/form-data; boundary=b"}
    answer = await client.post(PATH, content=body, headers=headers)
    assert answer.status_code == 400, answer.text


async def test_a_field_is_bounded(client: httpx.AsyncClient) -> None:
    answer = await send(client, prompt="x" * 100_000)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("declared", [True, False])
async def test_an_upload_is_bounded_and_leaves_nothing(
    talking: Any, service: FakeService, tmp_path: Path, declared: bool
) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        for _ in range(40):
            yield bytes(50_000)

    headers = {"content-type": "multipart/form-data; boundary=b", **({"content-length": "2000000"} if declared else {})}
    async with talking(service, max_upload_bytes=1_000_000) as client:
        answer = await client.post(PATH, content=pieces(), headers=headers)
    assert answer.status_code == 413
    assert list(tmp_path.iterdir()) == []


async def test_a_large_file_arrives_whole_and_is_gone_after_the_answer(
    client: httpx.AsyncClient, service: FakeService, tmp_path: Path
) -> None:
    async def measure(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
        assert isinstance(ask.audio, ArrivingFile)
        await asyncio.to_thread(ask.audio.wait)
        yield Done(Usage(output_tokens=ask.audio.size), Receipt())

    service.script = measure
    answer = await send(client, stream="true", file=bytes(3_000_000))
    assert '"output_tokens":3000000' in answer.text
    assert list(tmp_path.iterdir()) == []


async def test_nothing_is_left_after_a_failure(client: httpx.AsyncClient, service: FakeService, tmp_path: Path) -> None:
    async def fail(*_: Any) -> AsyncIterator[Any]:
        raise InvalidRequest("the file has no audio stream", param="file")
        yield

    service.script = fail
    answer = await send(client)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "file")
    assert (await send(client, model="other")).status_code == 404
    assert list(tmp_path.iterdir()) == []


async def test_a_client_that_leaves_stops_the_work(serving: Any, service: FakeService, tmp_path: Path) -> None:
    """speaches 129."""

    async def think(served: FakeServed, task: str, ask: Transcribe) -> AsyncIterator[Any]:
        await asyncio.sleep(60)
        yield

    service.script = think
    async with serving(service) as running, httpx.AsyncClient(base_url=running.url) as client:
        leaving = asyncio.create_task(send(client))
        while not service.running:
            await asyncio.sleep(0.01)
        leaving.cancel()
        async with asyncio.timeout(5):
            while not service.cancelled or list(tmp_path.iterdir()):
                await asyncio.sleep(0.01)
