"""The test that never goes red: every modality in one engine, and every answer the one that is given alone.

Jobs join, leave, share prefixes and push each other out of a small cache, with results at once and one launch late;
afterwards the engine holds nothing and no shared memory is lent. Models are tiny and random where they would be heavy.
A new modality joins with a `Participant` below.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from hibari import Hibari
from hypothesis import given, settings
from hypothesis import strategies as st
from polymux_hibari.program import SpeechProgram, VoiceModel
from polymux_hibari.work import Piece, SpeakWork

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.encode import EncodeStage
from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.cache.content import content_digest
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.load import prepare_body
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.pipeline import Program
from polymux.core.speech.telling import SPOKEN, Spoken
from polymux.core.tasks import Sampling
from polymux.core.testing.denoising import (
    CHANNELS,
    JOINT,
    POOLED,
    DenoiseProgram,
    DenoiseWork,
    flow_scheduler,
    read_latents,
    tiny_flux,
)
from polymux.core.testing.drive import Driver
from polymux.core.testing.mixture import Ask, Mixture, Participant, Visit, release
from polymux.core.testing.tiny import VOCABULARY, build, tiny_bert, tiny_idefics, tiny_llama, tiny_whisper
from polymux.core.testing.voices import CODES, tiny_csm
from polymux.modalities.asr.activity import SpeechDetector, open_activity
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.program import TranscriptionProgram
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import Endpointing
from polymux.modalities.asr.whisper import WhisperDecoder, WhisperEncoder, split_whisper
from polymux.modalities.asr.work import WINDOW, AudioChunk, TranscribeWork, WindowText
from polymux.modalities.diffusion import flux
from polymux.modalities.llm.embedder import TextEmbedder
from polymux.modalities.llm.program import EmbeddingProgram
from polymux.modalities.llm.work import VECTORS, EmbedWork, Vectors
from polymux.modalities.tts import codec_program
from polymux.modalities.tts import work as frame_work
from polymux.modalities.tts.codec_load import build_csm
from polymux.modalities.vision.program import LookProgram
from polymux.modalities.vision.split import split_model
from polymux.modalities.vision.work import Item, LookWork
from polymux.modalities.vision.work import Picture as Seen

# ---- chat: greedy and drawn, one and several choices, prompts that share their beginning ----

_decoder = cache(lambda: TransformersDecoder(build(tiny_llama)))


def load_chat(site: Site) -> Program:
    return GenerationProgram(TokenStage("decode", _decoder(), site), "chat")


def chat(prompt: list[int], tokens: int, choices: int = 1, temperature: float = 0.0) -> Ask:
    work = GenerateWork(
        prompts=[prompt],
        max_tokens=[tokens],
        seeds=list(range(choices)),
        n=choices,
        sampling=Sampling(temperature=temperature),
    )
    return Ask("chat", work)


def read_chat(driver: Driver, job: str) -> list[np.ndarray]:
    return [np.array(driver.tokens(job, branch)) for branch in sorted(driver.reasons(job))]


_SHARED = [7 * place % (VOCABULARY - 3) + 3 for place in range(40)]

CHAT = Participant(
    "chat",
    load_chat,
    [
        chat(_SHARED, 24),
        chat([*_SHARED[:24], 5, 6], 16, choices=3, temperature=1.0),
        chat([*_SHARED, 9], 30, temperature=0.8),
        chat([3], 50, choices=6, temperature=1.0),
    ],
    read_chat,
)

# ---- embeddings ----

_bert = cache(lambda: build(tiny_bert))


def load_embeddings(site: Site) -> Program:
    embedder = TextEmbedder(prepare_body(copy.deepcopy(_bert())), site, "mean")
    return EmbeddingProgram(OneShotStage("embed", embedder, site, max_units=64, to_host=True), embedder)


def read_embeddings(driver: Driver, job: str) -> list[np.ndarray]:
    vectors = [vector for part in driver.outputs(job, VECTORS, Vectors) for vector in part.split()]
    return [np.frombuffer(vector.data, "<f4") for vector in vectors]


EMBED = Participant(
    "embed",
    load_embeddings,
    [
        Ask("embed", EmbedWork.of([[5, 6, 7]])),
        Ask("embed", EmbedWork.of([list(range(3, 3 + 5 * place)) for place in range(1, 12)])),
    ],
    read_embeddings,
    tolerance=1e-5,
)

# ---- transcription: one window and several, language given and detected ----

_TOKENS = SpeechTokens(
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


@cache
def _whisper() -> tuple[WhisperEncoder, WhisperDecoder]:
    return split_whisper(build(tiny_whisper, seed=3))


def load_transcription(site: Site) -> Program:
    encoder, decoder = _whisper()
    stages = OneShotStage("encode", encoder, site, max_units=4, max_rows=4), TokenStage("decode", decoder, site)
    activity = open_activity(SpeechDetector.load(site.device.torch), site)
    return TranscriptionProgram(Hearing(*stages, _TOKENS, "whisper"), activity, encoder.samples)


_ALWAYS = Endpointing(threshold=0.0)
"""Noise is speech as well."""


def recording(seed: int, seconds: float) -> AudioChunk:
    noise = np.random.default_rng(seed).normal(0, 0.1, int(seconds * 16_000))
    return AudioChunk(noise.astype(np.float32), last=True)


def read_transcription(driver: Driver, job: str) -> list[np.ndarray]:
    return [np.array(window.tokens) for window in driver.outputs(job, WINDOW, WindowText)]


TRANSCRIBE = Participant(
    "transcribe",
    load_transcription,
    [
        Ask("transcribe", TranscribeWork(language="en", endpointing=_ALWAYS), [recording(1, 0.7)]),
        Ask("translate", TranscribeWork(endpointing=_ALWAYS), [recording(2, 2.6)]),
        Ask("transcribe", TranscribeWork(language="de", prompt=[10, 11], seek=True), [recording(3, 1.4)]),
    ],
    read_transcription,
)

# ---- speech: the real voice, which is small ----

_voice = cache(Hibari)


def load_speech(site: Site) -> Program:
    return SpeechProgram(OneShotStage("voice", VoiceModel({"heart": _voice()}), site, max_units=1, on_host=True))


def speech(*phonemes: str, speed: float = 1.0) -> Ask:
    pieces = [Piece(_voice().ids(piece), pace=speed) for piece in phonemes]
    return Ask("speak", SpeakWork("heart"), [*pieces, Piece(last=True)])


def read_speech(driver: Driver, job: str) -> list[np.ndarray]:
    return [spoken.samples for spoken in driver.outputs(job, SPOKEN, Spoken)]


SPEAK = Participant(
    "speak",
    load_speech,
    [speech("həlˈO ðˈɛɹ."), speech("wˈʌn.", "tˈu.", "θɹˈi.", speed=2.0)],
    read_speech,
)

# ---- speech in frames: a backbone, a depth decoder and a codec; greedy, and each piece with its pause ----

_csm = cache(lambda: build(tiny_csm, seed=3))


def load_frames(site: Site) -> Program:
    return build_csm(copy.deepcopy(_csm()), site, "frames", {"temperature": 0.0, "top_k": 0})


def frames(*texts: list[int]) -> Ask:
    """The tiny model has its text behind its codes."""
    pieces = [frame_work.Piece([CODES + 3 + id for id in text], pause=0.1) for text in texts]
    return Ask("speak", frame_work.SpeakWork(None, 5), [*pieces, frame_work.Piece(last=True)])


def read_frames(driver: Driver, job: str) -> list[np.ndarray]:
    """As a whole: how much of it is told at once depends on how far the frames are when a window is cut."""
    return [np.concatenate([spoken.samples for spoken in driver.outputs(job, SPOKEN, Spoken)]) / 32767]


FRAMES = Participant("frames", load_frames, [frames([5, 6, 7]), frames([9], [10, 11])], read_frames, tolerance=1e-3)

# ---- pictures: rows of other step counts, guidance and seeds ----

_flux = cache(tiny_flux)


def picture(seed: int, steps: int, side: int = 8, guided: bool = False) -> DenoiseRequest:
    generator = torch.Generator().manual_seed(seed)
    shape = (CHANNELS, side, side)
    branches = tuple(
        {
            flux.PROMPT: torch.randn(5, JOINT, generator=generator),
            flux.POOLED: torch.randn(POOLED, generator=generator),
            flux.GUIDANCE: torch.tensor(3.5),
        }
        for _ in range(1 + guided)
    )
    return DenoiseRequest(shape, flux.make_schedule(flow_scheduler(), steps, shape), branches, 4.0, seed)


_PICTURES = {
    "few steps": picture(1, 4),
    "many steps": picture(2, 15),
    "guided": picture(3, 6, guided=True),
    "wide": picture(4, 5, side=12),
}


def load_pictures(site: Site) -> Program:
    return DenoiseProgram(DenoiseStage("denoise", flux.FluxDenoiser(_flux()), site, max_units=10_000), _PICTURES)


DENOISE = Participant(
    "denoise",
    load_pictures,
    [Ask("denoise", DenoiseWork([name])) for name in _PICTURES] + [Ask("denoise", DenoiseWork(list(_PICTURES)))],
    lambda driver, job: [latent.numpy() for latent in read_latents(driver, job)],
    tolerance=1e-4,
)

# ---- chats about pictures: one picture and several, one of them asked about twice ----

_idefics = cache(lambda: build(tiny_idefics))


def load_looks(site: Site) -> Program:
    encoder, decoder = split_model(copy.deepcopy(_idefics()), {}, site.device)
    encode = EncodeStage("look", encoder, site, max_units=3)
    return LookProgram(encode, encoder, TokenStage("tell", decoder, site), "look", site)


def look(words: int, *seeds: int, choices: int = 1) -> Ask:
    """Some words, then each picture as one tile with a word before it."""
    prompt, pictures = _SHARED[:words], []
    for seed in seeds:
        tile = np.random.default_rng(seed).integers(0, 256, (1, 32, 32, 3), np.uint8)
        pictures.append(Seen([Item(tile, content_digest(tile), [len(prompt) + 1], [16])]))
        prompt = [*prompt, 3, *[VOCABULARY - 1] * 16]
    sampling = Sampling(temperature=0.7)
    seeds, prompts = list(range(choices)), [[*prompt, 5]]
    work = LookWork(prompts=prompts, pictures=pictures, max_tokens=[9], n=choices, seeds=seeds, sampling=sampling)
    return Ask("chat", work)


LOOK = Participant("look", load_looks, [look(3, 1), look(5, 2, 1, 3), look(2, 1, choices=3), look(9)], read_chat)

# ---- the load ----

MIXTURE = Mixture([CHAT, EMBED, TRANSCRIBE, SPEAK, FRAMES, DENOISE, LOOK])
MODELS = {participant.model: len(participant.asks) for participant in MIXTURE.participants}
DEVICES = {"in step": Device, "launch-ahead": LaggedCpu}

visits = st.sampled_from([(model, ask) for model, asks in MODELS.items() for ask in range(asks)]).flatmap(
    lambda what: st.builds(
        Visit,
        model=st.just(what[0]),
        ask=st.just(what[1]),
        join=st.integers(0, 25),
        leave=st.one_of(st.none(), st.none(), st.integers(0, 30)),
        priority=st.sampled_from([0, 0, 1]),
    )
)


def open_site(device: str, pages: int, **options: object) -> Site:
    """A cache of few pages, each large enough for one window's slab: whoever comes late has to push."""
    values = {"max_rows": 8, "max_units": 48, "block": 4, "superpage": 1 << 16, "cache_bytes": pages << 16}
    return Site(DEVICES[device](), SiteSettings(**{**values, **options}))  # type: ignore[arg-type]


@pytest.fixture(autouse=True, scope="module")
def short_sounds() -> Iterator[None]:
    """Random voices seldom come to an end: a dozen frames of each piece."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(codec_program, "LONGEST", 1.0)
        yield


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Several threads of tiny matrices do nothing but wait for each other on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("device", DEVICES)
def test_everything_at_once(device: str) -> None:
    """Every ask, some of them leaving, in a cache that is too small for the chats alone; then every ask again."""
    everything = [(model, ask) for model, asks in MODELS.items() for ask in range(asks)]
    crowd = [Visit("chat", 3, join=join) for join in (0, 1, 2)]
    stay = [Visit(model, ask, join=number % 5) for number, (model, ask) in enumerate(everything)]
    leave = [Visit(model, ask, join=3, leave=2 * number) for number, (model, ask) in enumerate(everything)]
    again = [Visit(model, ask, join=40 + number, priority=number % 2) for number, (model, ask) in enumerate(everything)]
    driver = MIXTURE.run(open_site(device, pages=5, max_rows=16), crowd + stay + leave + again)
    stats = driver.loop.stats()
    assert stats["preemptions_total"] > 0
    assert stats["prefix_cache_hits_total"] > 0


SHAPES = (
    st.sampled_from(sorted(DEVICES)),
    st.sampled_from([8, 12, 64]),
    st.booleans(),
    st.sampled_from([3, 16]),
)


@settings(max_examples=40, deadline=None)
@given(st.lists(visits, min_size=2, max_size=12), *SHAPES)
def test_any_mixture(asked: list[Visit], device: str, pages: int, deterministic: bool, rows: int) -> None:
    MIXTURE.run(open_site(device, pages, deterministic=deterministic, max_rows=rows), asked)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=150, deadline=None)
@given(st.lists(visits, min_size=2, max_size=30), *SHAPES)
def test_any_mixture_at_length(asked: list[Visit], device: str, pages: int, deterministic: bool, rows: int) -> None:
    MIXTURE.run(open_site(device, pages, deterministic=deterministic, max_rows=rows), asked)


def test_the_load_would_notice() -> None:
    """An answer that differs by one step of one sample, a job that fails, and memory that stays lent."""
    alone = MIXTURE.answer_alone("speak", 0)

    def read_wrongly(driver: Driver, job: str) -> list[np.ndarray]:
        wrong = read_speech(driver, job)
        wrong[0][7] += 1
        return wrong

    def load_broken(site: Site) -> Program:
        return SpeechProgram(OneShotStage("voice", VoiceModel({}), site, max_units=1, on_host=True))

    unread: list[tuple[Driver, str]] = []

    def read_nothing(driver: Driver, job: str) -> list[np.ndarray]:
        unread.append((driver, job))
        return alone

    for participant, complaint in (
        (replace(SPEAK, read=read_wrongly), "Mismatched"),
        (replace(SPEAK, load=load_broken), "was not answered"),
        (replace(SPEAK, read=read_nothing), "still lent"),
    ):
        with pytest.raises(AssertionError, match=complaint):
            Mixture([participant], {"speak 0": alone}).run(open_site("in step", 8), [Visit("speak", 0)])
    release(*unread[0])
