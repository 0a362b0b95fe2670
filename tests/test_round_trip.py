"""starter/speak through the gateway, by the official client: starter/transcribe in the same engine hears every word."""

from __future__ import annotations

import asyncio
import base64
import difflib
import io
import json
import re
import time
from collections.abc import AsyncIterator
from typing import Any

import av
import numpy as np
import openai
import polymux_starter
import pytest

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.pipeline import Program
from polymux.core.plugins import load_plugins
from polymux.core.service import Served, Service
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.media import write_wav
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

RATE = 24_000
SENTENCES = "The quick brown fox jumps over the lazy dog. Inference is the second phase of a model's life."
STORY = (
    "The morning train was late, so the students walked to school together. A gardener planted seven apple trees "
    "behind the old stone house. Rain fell on the quiet harbor while the fishermen repaired their nets. The teacher "
    "asked a simple question, and every hand went up at once. After dinner, they sat by the fire and listened to the "
    "wind."
)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def engine() -> LocalEngine:
    return LocalEngine({}, Site(settings=SiteSettings(deterministic=True)))


@pytest.fixture(scope="module")
async def client(engine: LocalEngine) -> AsyncIterator[openai.AsyncOpenAI]:
    plugins = load_plugins()
    served = []
    for named in (polymux_starter.SPEAK, polymux_starter.TRANSCRIBE):
        files = resolve(named.reference, sha256=named.sha256, sources=plugins.model_sources())
        pipeline = plugins.choose_pipeline(files)
        program: Program = pipeline.load(files, engine.site, named.options)  # type: ignore[arg-type]
        engine.programs[named.name] = program
        front = pipeline.front(files, named.options)
        served.append(Served(named.name, pipeline.tasks, front, engine, named.aliases))
    service = Service(served)
    settings = GatewaySettings(port=0, drain_seconds=0, finish_seconds=1)
    listener = bind_socket(settings)
    server = Server(create_app(service, settings), service)
    serving = asyncio.create_task(server.run_until_stopped(listener))
    while not (server.started and service.ready):
        await asyncio.sleep(0.05)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}/v1"
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0) as client:
        yield client
    server.should_exit = True
    await asyncio.wait_for(serving, 30)
    engine.loop.check_integrity()  # type: ignore[union-attr]


async def speak(client: openai.AsyncOpenAI, text: str, format: str = "wav", **more: Any) -> bytes:
    options: dict[str, Any] = {"model": "tts-1", "voice": "alloy", "response_format": format, **more}
    return (await client.audio.speech.create(input=text, **options)).content


async def hear(client: openai.AsyncOpenAI, data: bytes) -> str:
    answer = await client.audio.transcriptions.create(model="whisper-1", file=("speech", data))
    return answer.text


def spell(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


def count_same(said: list[str], heard: list[str]) -> int:
    """Words that were heard as they were said, in the order in which they were."""
    matcher = difflib.SequenceMatcher(a=said, b=heard, autojunk=False)
    return sum(block.size for block in matcher.get_matching_blocks())


def decode(format: str, data: bytes) -> np.ndarray:
    if format == "pcm":
        return np.frombuffer(data, "<i2") / 32768
    resampler = av.AudioResampler(format="flt", layout="mono", rate=RATE)
    with av.open(io.BytesIO(data)) as container:
        frames = [piece for frame in container.decode(audio=0) for piece in resampler.resample(frame)]
    return np.concatenate([frame.to_ndarray()[0] for frame in [*frames, *resampler.resample(None)]])


@pytest.mark.parametrize("format", ["wav", "pcm", "mp3", "opus", "aac", "flac"])
async def test_word_for_word_in_every_format(client: openai.AsyncOpenAI, format: str) -> None:
    data = await speak(client, SENTENCES, format)
    samples = decode(format, data)
    assert await hear(client, data if format != "pcm" else write_wav(samples, RATE)) == SENTENCES
    exact = len(await speak(client, SENTENCES, "pcm")) // 2
    assert 0 <= len(samples) - exact < {"mp3": 576, "aac": 1024}.get(format, 1)


@pytest.mark.parametrize(("speed", "misheard"), [(0.5, 0), (0.75, 0), (1.25, 0), (1.5, 1)])
async def test_word_for_word_at_other_speeds(client: openai.AsyncOpenAI, speed: float, misheard: int) -> None:
    """Half as fast again, the small recogniser may take one word for another."""
    said, heard = spell(SENTENCES), spell(await hear(client, await speak(client, SENTENCES, speed=speed)))
    assert len(heard) == len(said)
    assert count_same(said, heard) >= len(said) - misheard


async def test_a_story_loses_no_sentence(client: openai.AsyncOpenAI) -> None:
    assert spell(await hear(client, await speak(client, STORY))) == spell(STORY)


PROVERBS = (
    "Actions speak louder than words.",
    "The early bird catches the worm, but the second mouse gets the cheese.",
    "Seven people waited outside the library on Monday morning.",
    "She opened the window because the room was very warm.",
    "Please bring three green apples and a loaf of bread.",
    "The river was frozen, and the children went skating after school.",
    "My brother repairs old clocks in a small shop near the station.",
    "Nobody knows where the black cat sleeps at night.",
    "It takes two hours to drive from the village to the sea.",
    "He wrote a long letter to his friend in the mountains.",
    "When the music stopped, everyone looked at the door.",
    "A good book and a cup of tea make a perfect evening.",
)


async def test_nineteen_of_twenty_words_are_heard_again(client: openai.AsyncOpenAI) -> None:
    """Counted by edits over a set of sentences that were never tuned for."""
    said = heard = wrong = 0
    for text in PROVERBS:
        expected, found = spell(text), spell(await hear(client, await speak(client, text)))
        same = count_same(expected, found)
        said, heard, wrong = said + len(expected), heard + same, wrong + len(found) - same
    print(f"{heard} of {said} words, {wrong} that were not said")
    assert heard >= 0.95 * said
    assert wrong <= 0.05 * said


async def test_many_at_once_each_say_their_own(client: openai.AsyncOpenAI) -> None:
    sentences = [f"{sentence}." for sentence in STORY.removesuffix(".").split(". ")]
    together = await asyncio.gather(*(speak(client, sentence) for sentence in sentences))
    alone = [await speak(client, sentence) for sentence in sentences]
    assert together == alone


async def test_sound_begins_long_before_the_text_ends(client: openai.AsyncOpenAI) -> None:
    text = " ".join([STORY] * 4)
    events = client.audio.speech.with_streaming_response.create(
        model="tts-1", voice="alloy", input=text, response_format="pcm", stream_format="sse"
    )
    pieces, receipt = 0, {}
    async with events as answer:
        async for line in answer.iter_lines():
            if "speech.audio.delta" in line:
                pieces += 1
                assert len(base64.b64decode(json.loads(line[6:])["audio"])) > 4800
            elif "speech.audio.done" in line:
                receipt = json.loads(line[6:])["receipt"]
    assert pieces >= 20
    assert receipt["first_ms"] < receipt["total_ms"] / 8, receipt
    print(receipt)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": "😀🎉"}, "input"),
        ({"input": " \n "}, "input"),
        ({"input": "日本語"}, "input"),
        ({"voice": "nobody"}, "voice"),
        ({"speed": 0.0}, "speed"),
    ],
)
async def test_what_cannot_be_said_is_refused(client: openai.AsyncOpenAI, fields: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.audio.speech.create(**{"model": "tts-1", "voice": "alloy", "input": "x", **fields})
    assert refused.value.param == param


async def test_the_shortest_text_sounds(client: openai.AsyncOpenAI) -> None:
    assert spell(await hear(client, await speak(client, "Hello."))) == ["hello"]
    assert len(decode("mp3", await speak(client, "I", "mp3"))) > 4800


async def test_leaving_frees_the_voice_at_once(client: openai.AsyncOpenAI, engine: LocalEngine) -> None:
    asked: dict[str, Any] = {
        "model": "tts-1",
        "voice": "alloy",
        "input": " ".join([STORY] * 10),
        "response_format": "pcm",
    }
    async with client.audio.speech.with_streaming_response.create(**asked) as answer:
        async for _ in answer.iter_bytes():
            break
    async with asyncio.timeout(5):
        while engine.loop.jobs:  # type: ignore[union-attr]
            await asyncio.sleep(0.01)


async def test_speaking_does_not_hold_up_the_event_loop(client: openai.AsyncOpenAI) -> None:
    """In processor time of the loop's own thread: whatever else this machine does is not the gateway's fault."""
    longest = 0.0

    async def watch() -> None:
        nonlocal longest
        while True:
            begin = time.thread_time()
            await asyncio.sleep(0)
            longest = max(longest, time.thread_time() - begin)

    watcher = asyncio.create_task(watch())
    await asyncio.gather(*(speak(client, STORY, format) for format in ("mp3", "flac", "pcm", "wav", "opus", "aac")))
    watcher.cancel()
    assert longest < 0.05
