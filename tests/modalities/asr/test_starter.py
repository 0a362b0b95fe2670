"""starter/transcribe, through the gateway, by the official client: what hibari says comes back word for word."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator

import numpy as np
import openai
import polymux_starter
import pytest

from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.service import Served, Service
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.media import RECIPES, write_media, write_video, write_wav
from polymux.gateway.app import create_app
from polymux.gateway.server import Server, bind_socket
from polymux.gateway.settings import GatewaySettings
from polymux.modalities.asr.plugin import Transcription

hibari = pytest.importorskip("hibari", reason="pip install hibari-tts")

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

RATE = 24_000
SENTENCES = "The quick brown fox jumps over the lazy dog. Inference is the second phase of a model's life."
STORY = [
    "The morning train was late, so the students walked to school together.",
    "A gardener planted seven apple trees behind the old stone house.",
    "Nobody remembered where the captain had hidden his silver watch.",
    "Rain fell on the quiet harbor while the fishermen repaired their nets.",
    "The teacher asked a simple question, and every hand went up at once.",
    "We bought fresh bread, a piece of cheese, and two bottles of water.",
    "Her brother plays the violin in a small orchestra near the river.",
    "After dinner, they sat by the fire and listened to the wind.",
    "The museum opens at nine and closes at six in the evening.",
    "In the end, the tired travelers reached the top of the mountain.",
]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="module")
def voice():
    return hibari.Hibari()


@pytest.fixture(scope="module")
def speech(voice) -> np.ndarray:
    return np.concatenate(list(voice.stream(SENTENCES)))


@pytest.fixture(scope="module")
async def client() -> AsyncIterator[openai.AsyncOpenAI]:
    starter = polymux_starter.TRANSCRIBE
    files = resolve(starter.reference, sha256=starter.sha256)
    pipeline = Transcription()
    assert pipeline.accepts(files)
    site = Site(settings=SiteSettings(deterministic=True))
    engine = LocalEngine({starter.name: pipeline.load(files, site, starter.options)}, site)
    served = Served(starter.name, pipeline.tasks, pipeline.front(files, starter.options), engine, starter.aliases)
    service = Service([served])
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
    engine.loop.check_integrity()


def spell(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


async def test_every_answer_format(client, speech):
    file = ("speech.wav", write_wav(speech, RATE))

    async def ask(**options):
        return await client.audio.transcriptions.create(model="whisper-1", file=file, **options)

    assert (await ask()).text == SENTENCES
    assert await ask(response_format="text") == SENTENCES
    verbose = await ask(response_format="verbose_json", timestamp_granularities=["segment"])
    assert (verbose.text, verbose.language, verbose.task) == (SENTENCES, "english", "transcribe")
    assert "".join(segment.text for segment in verbose.segments) == SENTENCES
    assert verbose.duration == pytest.approx(len(speech) / RATE, abs=0.01)
    assert verbose.segments[0].no_speech_prob < 0.1 and verbose.segments[-1].end <= verbose.duration
    srt = await ask(response_format="srt")
    assert " ".join(line for line in srt.splitlines() if line[:1].isalpha()) == SENTENCES
    vtt = await ask(response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> ")
    events = [event async for event in await ask(stream=True)]
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == SENTENCES


@pytest.mark.parametrize("name", RECIPES)
async def test_every_container_says_the_same(client, speech, name):
    """The name never matters: each file pretends to be another kind."""
    file = ("speech.xyz", write_media(speech, RATE, RECIPES[name]))
    answer = await client.audio.transcriptions.create(model="starter/transcribe", file=file)
    assert spell(answer.text) == spell(SENTENCES)


async def test_a_long_recording_loses_nothing_at_its_cuts(client, voice):
    """Segments lie in the recording's own time: each sentence near where it was really said."""
    pause = np.zeros(RATE // 4, np.float32)
    pieces, starts, place = [], [], 0
    for sentence in STORY:
        said = np.concatenate(list(voice.stream(sentence)))
        starts.append(place / RATE)
        pieces += [said, pause]
        place += len(said) + len(pause)
    file = ("story.wav", write_wav(np.concatenate(pieces), RATE))
    answer = await client.audio.transcriptions.create(model="whisper-1", file=file, response_format="verbose_json")
    assert place / RATE > 35
    assert spell(answer.text) == spell(" ".join(STORY))
    assert "".join(segment.text for segment in answer.segments) == answer.text
    for sentence, start in zip(STORY, starts):
        segment = next(segment for segment in answer.segments if sentence[:12] in segment.text)
        assert abs(segment.start - start) < 1.0, (sentence, segment.start, start)


async def test_many_at_once_each_get_their_own(client, voice):
    """Eight different recordings decode together; every answer equals the one alone."""
    said = [np.concatenate(list(voice.stream(sentence))) for sentence in STORY[:8]]

    async def ask(sound):
        file = ("speech.wav", write_wav(sound, RATE))
        return (await client.audio.transcriptions.create(model="whisper-1", file=file)).text

    together = await asyncio.gather(*map(ask, said))
    assert [spell(text) for text in together] == [spell(sentence) for sentence in STORY[:8]]
    assert [await ask(sound) for sound in said[:2]] == together[:2]


@pytest.mark.parametrize("level", [0.0, 1e-5, 1e-3])
async def test_silence_is_never_an_invention(client, level):
    sound = np.random.default_rng(0).normal(0, level, RATE * 5)
    file = ("silence.wav", write_wav(sound, RATE))
    assert (await client.audio.transcriptions.create(model="whisper-1", file=file)).text == ""
    assert await client.audio.transcriptions.create(model="whisper-1", file=file, response_format="srt") == ""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_what_this_model_cannot_do_is_said(client, speech):
    file = ("speech.wav", write_wav(speech, RATE))
    with pytest.raises(openai.BadRequestError, match="English alone"):
        await client.audio.translations.create(model="whisper-1", file=file)
    with pytest.raises(openai.BadRequestError, match="language"):
        await client.audio.transcriptions.create(model="whisper-1", file=file, language="de")
    assert (await client.audio.transcriptions.create(model="whisper-1", file=file, language="en")).text == SENTENCES
    for broken in (b"", b"no sound", write_video()):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.audio.transcriptions.create(model="whisper-1", file=("a.wav", broken))
        assert caught.value.param == "file"


async def test_leaving_early_frees_everything_for_the_next(client, voice, speech):
    """A stream that is closed after its first event, and a request that is given up before any."""
    story = np.concatenate([np.concatenate(list(voice.stream(sentence))) for sentence in STORY])
    long = ("long.wav", write_wav(np.tile(story, 3), RATE))
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.5):
            await client.audio.transcriptions.create(model="whisper-1", file=long)
    stream = await client.audio.transcriptions.create(model="whisper-1", file=long, stream=True)
    async for event in stream:
        assert json.loads(event.model_dump_json())["type"] == "transcript.text.delta"
        break
    await stream.close()
    file = ("speech.wav", write_wav(speech, RATE))
    assert (await client.audio.transcriptions.create(model="whisper-1", file=file)).text == SENTENCES
