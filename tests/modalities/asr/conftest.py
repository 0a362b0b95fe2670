"""A tiny random Whisper with three languages, as transformers has it and as a program of a loop."""

from __future__ import annotations

import copy
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation.logits_process import (
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
    WhisperTimeStampLogitsProcessor,
)

from polymux.core.batch.drafting import open_drafter
from polymux.core.batch.oneshot import OneShotModel, OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import Device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_whisper
from polymux.modalities.asr.activity import CONTEXT, open_activity
from polymux.modalities.asr.alignment import Aligner, choose_heads, open_alignment
from polymux.modalities.asr.drafting import SmallWhisper
from polymux.modalities.asr.fallback import Fallback
from polymux.modalities.asr.features import LogMel
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.program import TranscriptionProgram
from polymux.modalities.asr.spelling import Speller
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import FRAME
from polymux.modalities.asr.warping import open_warping
from polymux.modalities.asr.whisper import split_whisper
from polymux.modalities.asr.work import AudioChunk, TranscribeWork

WINDOW = 16_000
"""Samples of the tiny model's window."""

TOKENS = SpeechTokens(
    end=80,
    start=81,
    previous=87,
    no_speech=88,
    no_timestamps=89,
    transcribe=86,
    translate=85,
    languages={"en": 82, "de": 83, "fr": 84},
    suppressed=(1, 2, 81, 82, 83, 84, 85, 86, 87, 88),
    suppressed_first=(5, 80),
    latest_start=25,
)


class Reference:
    """What transformers makes of one window."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.features = LogMel(model.config.num_mel_bins)
        config = model.generation_config
        config.no_timestamps_token_id = TOKENS.no_timestamps
        config.max_initial_timestamp_index = TOKENS.latest_start

    def generate(self, samples: np.ndarray, prompt: list[int]) -> list[int]:
        """Greedy tokens after the prompt, up to the end or the context's."""
        tokens = GenerationMixin.generate(
            self.model,
            self._features(samples),
            decoder_input_ids=torch.tensor([prompt]),
            logits_processor=self._rules(len(prompt)),
            max_length=self.model.config.max_target_positions,
            do_sample=False,
        )
        return [token for token in tokens[0, len(prompt) :].tolist() if token != TOKENS.end]

    def logprobs(self, samples: np.ndarray, prompt: list[int]) -> torch.Tensor:
        """Of the next token, before any rule."""
        with torch.inference_mode():
            logits = self.model(input_features=self._features(samples), decoder_input_ids=torch.tensor([prompt])).logits
        return logits[0, -1].log_softmax(-1)

    def confidence(self, samples: np.ndarray, prompt: list[int], tokens: list[int]) -> float:
        """The mean logprob of `tokens` behind the prompt, each under the rules."""
        ids = torch.tensor([[*prompt, *tokens]])
        with torch.inference_mode():
            logits = self.model(input_features=self._features(samples), decoder_input_ids=ids).logits
        rules = self._rules(len(prompt))
        places = range(len(prompt), ids.shape[1])
        scores = [rules(ids[:, :place], logits[:, place - 1]).log_softmax(-1)[0, ids[0, place]] for place in places]
        return float(torch.stack(scores).mean())

    def _rules(self, begin: int) -> LogitsProcessorList:
        return LogitsProcessorList(
            [
                SuppressTokensAtBeginLogitsProcessor(list(TOKENS.suppressed_first), begin),
                SuppressTokensLogitsProcessor(list(TOKENS.suppressed)),
                WhisperTimeStampLogitsProcessor(self.model.generation_config, begin),
            ]
        )

    def _features(self, samples: np.ndarray) -> torch.Tensor:
        return self.features(torch.from_numpy(np.pad(samples, (0, WINDOW - len(samples))))[None])


@pytest.fixture(scope="session")
def tokens() -> SpeechTokens:
    return TOKENS


@pytest.fixture(scope="session")
def whisper() -> torch.nn.Module:
    return build(tiny_whisper, seed=3)


@pytest.fixture(scope="session")
def reference(whisper) -> Reference:
    return Reference(whisper)


@pytest.fixture
def drive(whisper) -> Callable[..., Driver]:
    """`drive(Device, cache_bytes=...)`: a loop that serves the tiny model, or another one, as `whisper`.

    A random model is never sure, so it falls back on nothing unless it is told to.
    """

    def open_loop(
        device: type[Device] = Device,
        together: int = 4,
        fallback: Fallback | None = None,
        model: torch.nn.Module = whisper,
        spell: Callable[[Site], Speller] | None = None,
        speculation: object = None,
        **settings: object,
    ) -> Driver:
        values = {"max_rows": 6, "block": 4, "cache_bytes": 1 << 24, "superpage": 1 << 18, **settings}
        site = Site(device(), SiteSettings(**values))
        encoder, decoder = split_whisper(copy.deepcopy(model))
        drafter = open_drafter(speculation, decoder, site, [SmallWhisper(encoder)])
        heads = choose_heads(None, model.config.decoder_layers, model.config.decoder_attention_heads)
        hearing = Hearing(
            OneShotStage("encode", encoder, site, max_units=together, max_rows=together),
            TokenStage("decode", decoder, site, drafter=drafter),
            TOKENS,
            "tiny",
            fallback,
            open_alignment(Aligner(decoder, heads, site), site),
            open_warping(site),
            spell(site) if spell is not None else None,
        )
        program = TranscriptionProgram(hearing, open_activity(LoudnessDetector(), site), encoder.samples)
        return Driver(Loop(site, {"whisper": program}))

    return open_loop


class LoudnessDetector(OneShotModel):
    """Noise is no speech to a real detector: to this one whatever can be heard is."""

    def forward(self, items, slabs):
        def judge(item):
            loud = np.abs(item.samples[CONTEXT:]).reshape(-1, FRAME).max(axis=1) > 1e-4
            return torch.from_numpy(np.concatenate([loud, np.zeros(item.state.size)]).astype(np.float32))

        return [judge(item) for item in items]


@pytest.fixture
def detector() -> OneShotModel:
    return LoudnessDetector()


def make_sound(seed: int, seconds: float = 1.0) -> np.ndarray:
    """Noise that a window is never silent with."""
    return np.random.default_rng(seed).normal(0, 0.1, int(seconds * WINDOW)).astype(np.float32)


@pytest.fixture
def sound() -> Callable[..., np.ndarray]:
    return make_sound


@pytest.fixture
def transcribe() -> Callable[..., None]:
    """`transcribe(driver, "one", samples, task="translate", language="de")` submits and posts a recording."""

    def submit(driver: Driver, job: str, samples: np.ndarray, task: str = "transcribe", **work: object) -> None:
        driver.submit(job, "whisper", task, TranscribeWork(**work))
        driver.post(job, AudioChunk(samples, last=True))

    return submit
