"""Whatever a client sends wrongly is told as an error, with the id of the event; the socket and its sound live on."""

from __future__ import annotations

import asyncio
import json

import openai
import pytest
import websockets

pytestmark = pytest.mark.anyio

TRANSCRIBE = {"extra_query": {"intent": "transcription"}}
MANUAL = {"type": "transcription", "audio": {"input": {"turn_detection": None}}}

WRONG = {
    "not json": ("{", "invalid_json", None),
    "an array": ("[1]", "invalid_event", None),
    "a binary frame": (b"\0\1", "invalid_event", None),
    "deep nesting": ("[" * 200_000, "invalid_json", None),
    "NaN": ('{"type": NaN}', "invalid_json", None),
    "no type": ({"event_id": "e"}, "missing_required_parameter", "type"),
    "a type that is no text": ({"type": 1, "event_id": "e"}, "missing_required_parameter", "type"),
    "an unknown type": ({"type": "session.explode", "event_id": "e"}, "unknown_event", "type"),
    "an unknown field": (
        {"type": "input_audio_buffer.clear", "now": 1, "event_id": "e"},
        "unsupported_parameter",
        "now",
    ),
    "no audio": ({"type": "input_audio_buffer.append", "event_id": "e"}, "missing_required_parameter", "audio"),
    "audio that is no base64": (
        {"type": "input_audio_buffer.append", "audio": "AAAA*AAA", "event_id": "e"},
        "invalid_audio",
        "audio",
    ),
    "audio that is a number": (
        {"type": "input_audio_buffer.append", "audio": 1, "event_id": "e"},
        "invalid_value",
        "audio",
    ),
    "a session that is none": ({"type": "session.update", "session": 3, "event_id": "e"}, "invalid_value", "session"),
    "a rate that is not served": (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"format": {"type": "audio/pcm", "rate": 16000}}}},
            "event_id": "e",
        },
        "invalid_value",
        "session.audio.input.format",
    ),
    "a detector that is not served": (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"turn_detection": {"type": "semantic_vad"}}}},
            "event_id": "e",
        },
        "invalid_value",
        "session.audio.input.turn_detection.type",
    ),
    "a threshold out of range": (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"turn_detection": {"threshold": 2}}}},
            "event_id": "e",
        },
        "invalid_value",
        "session.audio.input.turn_detection.threshold",
    ),
    "a model that is not served": (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"transcription": {"model": "nobody"}}}},
            "event_id": "e",
        },
        "model_not_found",
        "model",
    ),
    "a model that cannot listen": (
        {
            "type": "session.update",
            "session": {"audio": {"input": {"transcription": {"model": "chat"}}}},
            "event_id": "e",
        },
        None,
        "session.audio.input.transcription.model",
    ),
    "a cancel with nothing to cancel": (
        {"type": "response.cancel", "event_id": "e"},
        "response_cancel_not_active",
        "response_id",
    ),
    "an item that is not there": (
        {"type": "conversation.item.delete", "item_id": "x", "event_id": "e"},
        "item_not_found",
        "item_id",
    ),
    "an empty commit": (
        {"type": "input_audio_buffer.commit", "event_id": "e"},
        "input_audio_buffer_commit_empty",
        None,
    ),
    "an answer in a transcription": ({"type": "response.create", "event_id": "e"}, "invalid_session", None),
}


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


async def test_every_mistake_is_told_and_survived(talking_live):
    """One socket makes them all, with sound in its buffer that is committed at the end, unharmed."""
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.connection.session.update(session=MANUAL)
        await talk.until("session.updated")
        for name, (frame, code, param) in WRONG.items():
            await talk.raw(frame if isinstance(frame, str | bytes) else json.dumps(frame))
            error = await talk.error()
            expected = "e" if isinstance(frame, dict) else None
            assert (error.code, error.param, error.event_id) == (code, param, expected), (name, error)
            assert error.message and error.type == "invalid_request_error"
        await talk.append(0.5)
        await talk.raw('{"type": "input_audio_buffer.append", "audio": "A"}')
        assert (await talk.error()).code == "invalid_audio"
        await talk.append(0.5)
        await talk.connection.input_audio_buffer.commit()
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        assert completed.transcript == "1.0 seconds"


async def test_a_commit_after_silence_has_committed(talking_live):
    """The detector was first: what is left is silence, and never written down."""
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.append(0.3, level=0.5)
        await talk.append(0.5)
        await talk.until("conversation.item.input_audio_transcription.completed")
        await talk.connection.input_audio_buffer.commit(event_id="late")
        error = await talk.error()
        assert (error.code, error.event_id) == ("input_audio_buffer_commit_empty", "late")


async def test_what_fails_in_the_engine_is_told_and_begun_again(talking_live, fake):
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.connection.session.update(session=MANUAL)
        await talk.append(0.5)
        await talk.connection.session.update(session={"audio": {"input": {"transcription": {"language": "xx"}}}})
        assert (await talk.error()).type == "invalid_request_error"
        await talk.append(0.5)
        await talk.connection.input_audio_buffer.commit()
        completed = await talk.until("conversation.item.input_audio_transcription.completed")
        assert completed.transcript == "0.5 seconds"
        assert fake.failed == 1


async def test_a_model_nobody_serves_closes_the_socket_for_good(fake, serving):
    async with serving(fake) as running:
        url = running.url.replace("http", "ws")
        async with websockets.connect(f"{url}/v1/realtime?model=nobody") as socket:
            event = json.loads(await socket.recv())
            assert event["type"] == "error" and event["error"]["code"] == "model_not_found"
            assert "chat" in event["error"]["message"], "the served names are listed"
            with pytest.raises(websockets.ConnectionClosed):
                await socket.recv()
            assert socket.close_code == 1008


async def test_one_socket_too_many_is_asked_to_come_again(fake, serving):
    async with serving(fake, max_running=1, max_waiting=0) as running:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none")
        async with (
            client,
            client.realtime.connect(**TRANSCRIBE) as first,
            client.realtime.connect(**TRANSCRIBE) as second,
        ):
            await first.input_audio_buffer.append(audio="AAAA")
            await asyncio.sleep(0.1)
            await second.input_audio_buffer.append(audio="AAAA")
            with pytest.raises(websockets.ConnectionClosed) as closed:
                while True:
                    event = await second.recv()
                    assert event.type in ("session.created", "error")
            assert closed.value.rcvd.code == 1013
            await first.input_audio_buffer.commit()
            assert (await first.recv()).type == "session.created"


async def test_leaving_stops_the_work(talking_live, fake):
    async with talking_live(**TRANSCRIBE) as talk:
        await talk.append(0.5)
        while not fake.running:
            await asyncio.sleep(0.01)
    for _ in range(1000):
        if not fake.running:
            break
        await asyncio.sleep(0.01)
    assert (fake.running, fake.cancelled) == (0, 1)


async def test_keys_and_client_secrets(fake, serving):
    async with serving(fake, api_keys=("right",)) as running:
        url = f"{running.url}/v1"
        socket = f"{url.replace('http', 'ws')}/realtime"
        async with openai.AsyncOpenAI(base_url=url, api_key="right") as client:
            secret = await client.realtime.client_secrets.create(session=MANUAL, expires_after={"seconds": 60})
        assert secret.value.startswith("ek_") and secret.session.type == "transcription"
        for key in ("right", secret.value):
            protocols = ["realtime", f"openai-insecure-api-key.{key}"]
            async with websockets.connect(socket, subprotocols=protocols) as browser:
                assert browser.subprotocol == "realtime"
                greeting = json.loads(await browser.recv())
                wanted = "transcription" if key == secret.value else "realtime"
                assert greeting["session"]["type"] == wanted, "a secret brings its session along"
        with pytest.raises(websockets.InvalidStatus) as refused:
            await websockets.connect(socket, additional_headers={"Authorization": "Bearer wrong"})
        assert refused.value.response.status_code == 403
        async with openai.AsyncOpenAI(base_url=url, api_key=secret.value, max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()
