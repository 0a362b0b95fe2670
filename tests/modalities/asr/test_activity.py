"""Silero's own probabilities, in pieces of any size and in any company; utterances begin and end where they do."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site
from polymux.core.pipeline import Program
from polymux.core.tasks import Embed, Vector
from polymux.core.testing.drive import Driver
from polymux.modalities.asr.activity import Listener, SpeechDetector, open_activity
from polymux.modalities.asr.utterances import FRAME, Edge, Endpointing, Utterances

RATE = 16_000


def babble(seed: int, seconds: float = 3.0) -> np.ndarray:
    """Between silence and speech: a buzz whose pitch and loudness wander, so that probabilities vary."""
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * RATE)) / RATE
    pitch = np.cumsum(120 + 40 * np.sin(2 * np.pi * 3 * time + seed)) / RATE
    voice = sum(np.sin(2 * np.pi * pitch * k) / k for k in range(1, 20))
    loudness = np.clip(np.sin(2 * np.pi * 1.5 * time + seed), 0, 1)
    return (0.1 * voice * loudness + rng.normal(0, 0.003, len(time))).astype(np.float32)


class Hearing(Program):
    """Hears recording `n` in pieces of `dimensions` samples."""

    def __init__(self, stage: OneShotStage, recordings: dict[int, np.ndarray]) -> None:
        self.work = {"hear": Embed}
        self.stages = (stage,)
        self.stage = stage
        self.recordings = recordings

    async def run(self, job: Job, work: Embed) -> None:
        (seed,) = work.inputs[0]
        samples, step = self.recordings[seed], work.dimensions
        listener = Listener(self.stage)
        heard = []
        for start in range(0, len(samples), step):
            piece = samples[start : start + step]
            heard.append(await listener.hear(job, piece, last=start + step >= len(samples)))
        assert listener.position == -(-len(samples) // FRAME) * FRAME
        job.emit("heard", Vector(seed, np.concatenate(heard).tobytes()))


def hear(device: type[Device], steps: dict[int, int]) -> dict[int, np.ndarray]:
    """Recording by seed, each in pieces of its own size, all at once."""
    site = Site(device())
    recordings = {seed: babble(seed) for seed in steps}
    stage = open_activity(SpeechDetector.load(site.device.torch), site)
    driver = Driver(Loop(site, {"silero": Hearing(stage, recordings)}))
    for seed, step in steps.items():
        driver.submit(str(seed), "silero", "hear", Embed(inputs=[[seed]], dimensions=step))
    driver.finish()
    outputs = {seed: driver.outputs(str(seed), "heard", Vector) for seed in steps}
    return {seed: np.frombuffer(output[0].data, np.float32) for seed, output in outputs.items()}


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_probabilities_are_those_of_the_package_for_pieces_of_any_size(device):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        silero_vad = pytest.importorskip("silero_vad")
        theirs = silero_vad.load_silero_vad()
    found = hear(device, {1: 512, 2: 48_000, 3: 700, 4: 100, 5: 16_000})
    for seed, probabilities in found.items():
        expected = theirs.audio_forward(torch.from_numpy(babble(seed)), RATE)[0].numpy()
        assert np.abs(probabilities - expected).max() < 1e-4
    assert max(map(np.ptp, found.values())) > 0.5, "nothing varied, so nothing was tested"


def listen(*stretches: tuple[float, float], length: float | None = None, **options: float) -> list[tuple[bool, float]]:
    """Edges in seconds for stretches of (probability, seconds), told frame by frame."""
    utterances = Utterances(Endpointing(**{"padding": 0.0, "silence": 0.5, "shortest": 0.1, **options}))
    edges: list[Edge] = []
    for probability, seconds in stretches:
        for _ in range(round(seconds * RATE / FRAME)):
            edges += utterances.feed(np.array([probability]))
    edges += utterances.finish(utterances.position if length is None else round(length * RATE))
    return [(edge.begins, edge.position / RATE) for edge in edges]


def test_an_utterance_ends_after_enough_silence():
    assert listen((0.0, 0.32), (0.9, 0.64), (0.0, 0.64)) == [(True, 0.32), (False, 0.96)]
    assert listen((0.9, 0.64), (0.0, 0.32), (0.9, 0.64), (0.0, 0.64)) == [(True, 0.0), (False, 1.6)]


def test_what_ends_with_the_recording():
    assert listen((0.0, 0.32), (0.9, 0.64)) == [(True, 0.32), (False, 0.96)]
    assert listen((0.9, 0.64), (0.0, 0.32)) == [(True, 0.0), (False, 0.64)]
    assert listen((0.9, 0.64), length=0.63) == [(True, 0.0), (False, 0.63)]


def test_clicks_and_doubt_are_no_speech():
    assert listen((0.0, 0.32), (0.9, 0.064), (0.0, 0.96)) == []
    assert listen((0.45, 3.2)) == []
    # once begun, doubt goes on
    assert listen((0.9, 0.32), (0.4, 3.2), (0.0, 0.64)) == [(True, 0.0), (False, 3.52)]


def test_padding_never_reaches_into_what_was_told():
    edges = listen((0.0, 1.6), (0.9, 0.64), (0.0, 0.64), (0.9, 0.64), (0.0, 1.6), padding=0.4)
    assert edges == [(True, 1.2), (False, 2.64), (True, 2.64), (False, 3.92)]
    positions = [position for _, position in edges]
    assert positions == sorted(positions)
