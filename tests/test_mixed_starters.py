"""Mixed load with the real starters: all eight in one engine, each as if alone."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from io import BytesIO

import msgspec
import numpy as np
import polymux_starter
import pytest
from PIL import Image, ImageDraw

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.plugins import Plugins, load_plugins
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Chat, Embed, Film, Paint, Sampling, Speak, Transcribe
from polymux.core.testing.drive import Driver
from polymux.core.testing.media import write_wav
from polymux.core.testing.mixture import Ask, Mixture, Participant, Visit
from polymux.core.vocabulary import NamedModel
from polymux.modalities.asr.work import WINDOW, WindowText
from polymux.modalities.diffusion.work import PICTURE, Painted
from polymux.modalities.llm.work import VECTORS, Vectors

pytestmark = pytest.mark.slow

SENTENCE = "The quick brown fox jumps over the lazy dog."


def join(
    plugins: Plugins,
    named: NamedModel,
    asks: list[tuple[str, msgspec.Struct]],
    read: Callable[[Driver, str], list[np.ndarray]],
    tolerance: float = 0.0,
) -> Participant:
    """A served model as a participant: its own pipeline loads it, its own front prepares the asks."""
    files = resolve(named.reference, sha256=named.sha256, sources=plugins.model_sources())
    pipeline = plugins.choose_pipeline(files)
    front = pipeline.front(files, named.options)
    prepared = [(task, front.prepare(task, ask)) for task, ask in asks]
    return Participant(
        named.name,
        lambda site: pipeline.load(files, site, named.options),
        [Ask(task, each.work, list(each.messages)) for task, each in prepared],
        read,
        tolerance,
    )


def say(words: str) -> tuple[str, msgspec.Struct]:
    greedy = Sampling(temperature=0.0, seed=1)
    system = {"role": "system", "content": "You are a helpful assistant who answers in one short sentence."}
    return "chat", Chat(messages=[system, {"role": "user", "content": words}], sampling=greedy, max_tokens=24)


def draw_square() -> str:
    """A data URI of a red square on a white ground."""
    picture = Image.new("RGB", (64, 64), "white")
    ImageDraw.Draw(picture).rectangle((20, 20, 44, 44), fill=(230, 30, 30))
    file = BytesIO()
    picture.save(file, "png")
    return f"data:image/png;base64,{b64encode(file.getvalue()).decode()}"


def show(url: str) -> dict[str, object]:
    return {"type": "image_url", "image_url": {"url": url}}


def question(words: str) -> tuple[str, msgspec.Struct]:
    content = [show(draw_square()), {"type": "text", "text": words}]
    asked = Chat(messages=[{"role": "user", "content": content}], sampling=Sampling(temperature=0.0), max_tokens=12)
    return "chat", asked


def read_tokens(driver: Driver, job: str) -> list[np.ndarray]:
    return [np.array(driver.tokens(job))]


def read_vectors(driver: Driver, job: str) -> list[np.ndarray]:
    parts = driver.outputs(job, VECTORS, Vectors)
    return [np.frombuffer(vector.data, "<f4") for part in parts for vector in part.split()]


def read_pixels(driver: Driver, job: str) -> list[np.ndarray]:
    return [painted.pixels.astype(float) for painted in driver.outputs(job, PICTURE, Painted)]


def read_speech(driver: Driver, job: str) -> list[np.ndarray]:
    return [spoken.samples for spoken in driver.outputs(job, SPOKEN, Spoken)]


@pytest.fixture(scope="module")
def mixture() -> Mixture:
    plugins = load_plugins()
    speak = join(
        plugins,
        polymux_starter.SPEAK,
        [("speak", Speak(text=f"{SENTENCE} And so it goes on.")), ("speak", Speak(text="Hi.", speed=0.5))],
        read_speech,
    )
    alone = Mixture([speak])
    spoken = np.concatenate(alone.answer_alone(speak.model, 0)) / 32768
    chat = join(
        plugins,
        polymux_starter.CHAT,
        [say("What is the capital of France?"), say("Count to five."), say("What is the capital of Italy?")],
        read_tokens,
    )
    embed = join(
        plugins,
        polymux_starter.EMBED,
        [("embed", Embed(inputs=[SENTENCE])), ("embed", Embed(inputs=[SENTENCE * count for count in range(1, 9)]))],
        read_vectors,
        tolerance=1e-5,
    )
    transcribe = join(
        plugins,
        polymux_starter.TRANSCRIBE,
        [("transcribe", Transcribe(audio=write_wav(spoken, 24_000)))],
        lambda driver, job: [np.array(window.tokens) for window in driver.outputs(job, WINDOW, WindowText)],
    )
    trained = {named.name: named for named in polymux_starter.find_trained()}
    see = join(
        plugins,
        trained["starter/see"],
        [question("What colour is the square?"), question("Describe the picture.")],
        read_tokens,
    )
    look = join(
        plugins,
        trained["starter/look"],
        [("embed", Embed(inputs=["a red square", show(draw_square())]))],
        read_vectors,
        tolerance=1e-5,
    )
    paint = join(
        plugins,
        trained["starter/paint"],
        [
            ("image", Paint(prompt="a small red ring at the left", seed=1, steps=6, n=2)),
            ("image", Paint(prompt="five blue stars", seed=3, steps=9)),
        ],
        read_pixels,
        tolerance=1.0,
    )
    film = join(
        plugins,
        trained["starter/film"],
        [("video", Film(prompt="a red circle moving right", seed=1, steps=4))],
        read_pixels,
        tolerance=1.0,
    )
    return Mixture([chat, embed, transcribe, speak, see, look, paint, film])


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_the_starters_at_once(mixture: Mixture, device: type[Device]) -> None:
    """Everybody comes twice, and a third crowd leaves on the way; the second chat finds the first one's prefix."""
    everything = [
        (participant.model, ask) for participant in mixture.participants for ask in range(len(participant.asks))
    ]
    visits = [Visit(model, ask, join=number) for number, (model, ask) in enumerate(everything)]
    visits += [Visit(model, ask, join=1, leave=3 * number) for number, (model, ask) in enumerate(everything)]
    visits += [Visit(model, ask, join=30 + number) for number, (model, ask) in enumerate(everything)]
    driver = mixture.run(Site(device(), SiteSettings(deterministic=True, cache_bytes=1 << 29)), visits)
    assert driver.loop.stats()["prefix_cache_hits_total"] > 0
