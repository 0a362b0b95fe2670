"""Mixed load with the real starters: chat, embeddings, transcription and speech in one engine, each as if alone."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import polymux_starter
import pytest

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import resolve
from polymux.core.plugins import Plugins, load_plugins
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Chat, Embed, Sampling, Speak, Transcribe
from polymux.core.testing.drive import Driver
from polymux.core.testing.media import write_wav
from polymux.core.testing.mixture import Ask, Mixture, Participant, Visit
from polymux.core.vocabulary import NamedModel
from polymux.modalities.asr.work import WINDOW, WindowText
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
        lambda driver, job: [np.array(driver.tokens(job))],
    )
    embed = join(
        plugins,
        polymux_starter.EMBED,
        [("embed", Embed(inputs=[SENTENCE])), ("embed", Embed(inputs=[SENTENCE * count for count in range(1, 9)]))],
        lambda driver, job: [
            np.frombuffer(vector.data, "<f4")
            for vector in [vector for part in driver.outputs(job, VECTORS, Vectors) for vector in part.split()]
        ],
        tolerance=1e-5,
    )
    transcribe = join(
        plugins,
        polymux_starter.TRANSCRIBE,
        [("transcribe", Transcribe(audio=write_wav(spoken, 24_000)))],
        lambda driver, job: [np.array(window.tokens) for window in driver.outputs(job, WINDOW, WindowText)],
    )
    return Mixture([chat, embed, transcribe, speak])


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
