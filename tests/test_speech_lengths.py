"""Fifty texts, from one word to two thousand, in every format: a file is as long as its sound, to one codec frame."""

from __future__ import annotations

import io
from random import Random

import av
import polymux_starter
import pytest

from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site
from polymux.core.models import resolve
from polymux.core.pipeline import Front
from polymux.core.plugins import load_plugins
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Sound, Speak
from polymux.core.testing.drive import Driver
from polymux.core.testing.mixture import release
from polymux.gateway.encoding import open_encoder

RATE = 24_000
FRAME = {"mp3": 576, "aac": 1024, "opus": 480, "flac": 1, "wav": 1, "pcm": 1}
"""Samples of one frame at 24 kHz; what holds samples themselves is exact."""
TEXTS = 50
MOST = 2000
WORDS = "the morning train was late so students walked to school and a gardener planted seven apple trees"


def write_text(number: int) -> str:
    """1 to 2,000 words in sentences; few of them long, since a thousand words are seven minutes."""
    count = 1 + round((number / (TEXTS - 1)) ** 40 * (MOST - 1)) + number % 12 * (number < TEXTS - 1)
    random = Random(number)
    words = [random.choice(WORDS.split()) for _ in range(count)]
    sentences = [" ".join(words[start : start + 11]).capitalize() + "." for start in range(0, count, 11)]
    return " ".join(sentences)


@pytest.fixture(scope="module")
def voice() -> tuple[Front, Driver]:
    """The starter voice: its front, and a loop that speaks with it."""
    plugins = load_plugins()
    named = polymux_starter.SPEAK
    files = resolve(named.reference, sha256=named.sha256, sources=plugins.model_sources())
    pipeline = plugins.choose_pipeline(files)
    site = Site()
    return pipeline.front(files, named.options), Driver(
        Loop(site, {"voice": pipeline.load(files, site, named.options)})
    )


def speak(voice: tuple[Front, Driver], job: str, text: str) -> list[Sound]:
    front, driver = voice
    prepared = front.prepare("speak", Speak(text=text))
    driver.submit(job, "voice", "speak", prepared.work)
    for message in prepared.messages:
        driver.post(job, message)
    driver.finish()
    sounds = [Sound(spoken.samples.tobytes(), RATE) for spoken in driver.outputs(job, SPOKEN, Spoken)]
    release(driver, job)
    return sounds


def count_samples(format: str, data: bytes) -> int:
    """As a player gets them, at 24 kHz."""
    if format == "pcm":
        return len(data) // 2
    with av.open(io.BytesIO(data)) as container:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=RATE)
        frames = [piece for frame in [*container.decode(audio=0), None] for piece in resampler.resample(frame)]
    return sum(frame.samples for frame in frames)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_text_is_as_long_in_every_format(voice: tuple[Front, Driver]) -> None:
    counted = 0
    for number in range(TEXTS):
        text = write_text(number)
        counted = max(counted, len(text.split()))
        sounds = speak(voice, str(number), text)
        samples = sum(len(sound.data) for sound in sounds) // 2
        assert samples > 2400
        for format, frame in FRAME.items():
            encoder = open_encoder(format, whole=False)  # type: ignore[arg-type]
            data = b"".join([*(encoder.encode(sound) for sound in sounds), encoder.finish()])
            assert 0 <= count_samples(format, data) - samples < frame, (number, format)
    assert counted == MOST
