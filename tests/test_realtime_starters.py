"""The starters on one socket: speech written down while it lasts, and a spoken question answered aloud."""

from __future__ import annotations

import asyncio
import base64
import io
import re
import wave
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import openai
import polymux_starter
import pytest

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.plugins import load_plugins
from polymux.core.service import Served, Service
from polymux.core.testing.engine import LocalEngine
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings

hibari = pytest.importorskip("hibari", reason="pip install hibari-tts")

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

RATE = 24_000
TRANSCRIBE = {"extra_query": {"intent": "transcription"}, "model": "starter/transcribe"}
SENTENCES = [
    "The morning train was late, so the students walked to school together.",
    "We bought fresh bread, a piece of cheese, and some bottles of water.",
    "Her brother plays the violin in a small orchestra near the river.",
    "After dinner, they sat by the fire and listened to the wind.",
]

MORE = [
    "A small boat crossed the lake before the storm came over the hills.",
    "My friend grows tomatoes, beans and carrots behind the old garage.",
    "The museum opens early and closes again late in the evening.",
    "Seven yellow birds were singing in the tall tree by the school gate.",
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def voice() -> Any:
    return hibari.Hibari()


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    """All three models of the voice loop in one engine."""
    plugins = load_plugins()
    site = Site(settings=SiteSettings(deterministic=True))
    programs, halves = {}, []
    for named in (polymux_starter.TRANSCRIBE, polymux_starter.CHAT, polymux_starter.SPEAK):
        files = resolve(named.reference, sha256=named.sha256, sources=plugins.model_sources())
        pipeline = plugins.choose_pipeline(files)
        programs[named.name] = pipeline.load(files, site, named.options)
        halves.append((named, pipeline, pipeline.front(files, named.options)))
    engine = LocalEngine(programs, site)
    service = Service(
        Served(named.name, pipeline.tasks, front, engine, named.aliases) for named, pipeline, front in halves
    )
    settings = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1)
    listener = bind_socket(settings)
    server = Server(create_app(service, settings), service)
    serving = asyncio.create_task(server.run_until_stopped(listener))
    while not (server.started and service.ready):
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=240) as client:
        yield client
    server.should_exit = True
    await asyncio.wait_for(serving, 30)
    engine.loop.check_integrity()


def say(voice: Any, text: str) -> np.ndarray:
    """Half a second of silence, the sentence, and a second in which it ends; not quite silent, as rooms are not."""
    said = np.concatenate([np.zeros(RATE // 2), *voice.stream(text), np.zeros(RATE)])
    return said + np.random.default_rng(0).normal(0, 1e-4, len(said))


def encode(sound: np.ndarray) -> bytes:
    return (np.clip(sound, -1, 1) * 32767).astype("<i2").tobytes()


async def send(connection: Any, sound: np.ndarray, pace: float = 0.0) -> None:
    """100 ms at a time, `pace` seconds apart."""
    data = encode(sound)
    for start in range(0, len(data), RATE // 5):
        await connection.input_audio_buffer.append(audio=base64.b64encode(data[start : start + RATE // 5]).decode())
        await asyncio.sleep(pace)


async def collect(connection: Any, until: str) -> list[Any]:
    events = []
    async with asyncio.timeout(200):
        while not events or events[-1].type != until:
            events.append(await connection.recv())
            assert events[-1].type != "error", events[-1].error
    return events


def spell(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


COMPLETED = "conversation.item.input_audio_transcription.completed"
DELTA = "conversation.item.input_audio_transcription.delta"


async def test_words_come_while_a_sentence_lasts(client, voice):
    async with client.realtime.connect(**TRANSCRIBE) as connection:
        sending = asyncio.create_task(send(connection, say(voice, SENTENCES[0]), pace=0.1))
        events = await collect(connection, COMPLETED)
        await sending
    assert spell(events[-1].transcript) == spell(SENTENCES[0])
    deltas = [event.delta for event in events if event.type == DELTA]
    assert "".join(deltas) == events[-1].transcript
    assert len(deltas) >= 2, "told in pieces: how early is measured by benchmarks/realtime.py"


@pytest.mark.parametrize("sentences", [[*SENTENCES, *MORE], SENTENCES * 2], ids=["different", "said twice"])
async def test_a_long_manual_utterance_is_cut_where_it_is_quiet(client, voice, sentences):
    """Longer than the model's window, committed by hand, by the other policy's rules too: no word is lost."""
    sound = np.concatenate([say(voice, sentence) for sentence in sentences])
    assert len(sound) / RATE > 32
    async with client.realtime.connect(**TRANSCRIBE) as connection:
        await connection.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        await send(connection, sound)
        await connection.input_audio_buffer.commit()
        events = await collect(connection, COMPLETED)
    said, heard = spell(" ".join(sentences)), spell(events[-1].transcript)
    assert abs(len(said) - len(heard)) <= 3 and len(set(said) - set(heard)) <= 2, events[-1].transcript
    assert "".join(event.delta for event in events if event.type == DELTA) == events[-1].transcript


async def test_silence_is_never_an_invention(client):
    async with client.realtime.connect(**TRANSCRIBE) as connection:
        await connection.session.update(session={"type": "transcription", "audio": {"input": {"turn_detection": None}}})
        await send(connection, np.random.default_rng(0).normal(0, 1e-3, 3 * RATE))
        await connection.input_audio_buffer.commit()
        events = await collect(connection, COMPLETED)
    assert events[-1].transcript == ""


async def test_twenty_sockets_at_once_all_finish(client, voice):
    """Far more than two cores can follow in real time: every one is served in the end, and none is closed."""
    sounds = [say(voice, sentence) for sentence in SENTENCES]

    async def dictate(number: int) -> str:
        async with client.realtime.connect(**TRANSCRIBE) as connection:
            sending = asyncio.create_task(send(connection, sounds[number % 4], pace=0.1))
            events = await collect(connection, COMPLETED)
            await sending
            return events[-1].transcript

    heard = await asyncio.gather(*map(dictate, range(20)))
    wrong = sum(len(set(spell(SENTENCES[n % 4])) ^ set(spell(text))) for n, text in enumerate(heard))
    assert wrong <= 20, heard


async def test_an_answer_that_is_spoken_over_stops_and_the_interruption_is_answered(client, voice):
    session = {
        "type": "realtime",
        "instructions": "Tell a very long story.",
        "max_output_tokens": 400,
        "temperature": 0,
        "audio": {"input": {"transcription": {"model": "starter/transcribe"}}, "output": {"model": "starter/speak"}},
    }
    async with client.realtime.connect(model="starter/chat") as connection:
        await connection.session.update(session=session)
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
        )
        await connection.response.create()
        first = (await collect(connection, "response.output_audio.delta"))[-1]
        await connection.session.update(session={**session, "max_output_tokens": 16})
        await send(connection, say(voice, "What is the capital of France?"))
        stopped = (await collect(connection, "response.done"))[-1].response
        assert (stopped.status, stopped.status_details.reason) == ("cancelled", "turn_detected")
        assert (stopped.id, stopped.output[0].status) == (first.response_id, "incomplete")
        events = await collect(connection, "response.done")
    heard = next(event.transcript for event in events if event.type == COMPLETED)
    assert spell(heard) == spell("What is the capital of France?")
    assert events[-1].response.output[0].content[0].transcript


async def test_a_spoken_question_is_answered_aloud(client, voice):
    """Question in, answer out; what the answer's sound says is what its transcript says."""
    session = {
        "type": "realtime",
        "temperature": 0,
        "instructions": "You are a helpful assistant who answers in one short sentence.",
        "max_output_tokens": 40,
        "audio": {
            "input": {"transcription": {"model": "starter/transcribe"}},
            "output": {"model": "starter/speak", "voice": "heart"},
        },
    }
    async with client.realtime.connect(model="starter/chat") as connection:
        await connection.session.update(session=session)
        sending = asyncio.create_task(send(connection, say(voice, "What is the capital of France?")))
        events = await collect(connection, "response.done")
        await sending
        heard = next(event.transcript for event in events if event.type == COMPLETED)
        assert spell(heard) == spell("What is the capital of France?")
        answer = events[-1].response
        transcript = answer.output[0].content[0].transcript
        assert "paris" in spell(transcript)
        sound = b"".join(
            base64.b64decode(event.delta) for event in events if event.type == "response.output_audio.delta"
        )
        item = answer.output[0].id

        # playback stopped half way: the conversation remembers no more than that
        half = len(sound) // 2 * 1000 // 48_000
        await connection.conversation.item.truncate(item_id=item, content_index=0, audio_end_ms=half)
        await collect(connection, "conversation.item.truncated")
        await connection.conversation.item.retrieve(item_id=item)
        kept = (await collect(connection, "conversation.item.retrieved"))[-1].item.content[0].transcript
        assert transcript.startswith(kept) and 0 < len(kept) < len(transcript)

        # a long answer is cancelled as soon as it is heard
        await connection.conversation.item.create(
            item={"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Tell me a story."}]}
        )
        await connection.response.create(response={"max_output_tokens": 400})
        await collect(connection, "response.output_audio.delta")
        await connection.response.cancel()
        done = (await collect(connection, "response.done"))[-1].response
        assert (done.status, done.status_details.reason) == ("cancelled", "client_cancelled")

    file = io.BytesIO()
    with wave.open(file, "wb") as writer:
        writer.setnchannels(1)
        writer.setsampwidth(2)
        writer.setframerate(RATE)
        writer.writeframes(sound)
    again = await client.audio.transcriptions.create(model="starter/transcribe", file=("a.wav", file.getvalue()))
    missing = set(spell(transcript)) - set(spell(again.text))
    assert len(missing) <= 0.1 * len(spell(transcript)), (transcript, again.text)
