"""A draft model's guesses change no word, time or probability: under every rule, in any company; they save passes."""

from __future__ import annotations

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from polymux.core.batch.rounds import GuessRounds
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError, ModelError
from polymux.core.models import resolve
from polymux.core.tasks import Commit, Hear, Leave
from polymux.core.testing.drive import Driver
from polymux.core.testing.media import write_wav
from polymux.core.testing.tiny import build, tiny_llama, tiny_whisper
from polymux.modalities.asr.audio import read_audio
from polymux.modalities.asr.encoder import Encoder
from polymux.modalities.asr.fallback import Fallback
from polymux.modalities.asr.plugin import Transcription
from polymux.modalities.asr.whisper import WhisperEncoder, load_whisper, same_weights, split_whisper
from polymux.modalities.asr.work import AudioChunk, ListenWork, TranscribeWork, WindowText, Written

EAGER = Fallback(lambda tokens: " ".join(map(str, tokens)), temperatures=(0.5, 1.0), draws=3)
"""Tiny random models are never sure: every window falls back on draws."""

both_devices = pytest.mark.parametrize("device", [Device, LaggedCpu])


def reshape(**changes: int) -> torch.nn.Module:
    config = tiny_whisper().config
    for name, value in changes.items():
        setattr(config, name, value)
    return WhisperForConditionalGeneration(config)


def distil(whisper: torch.nn.Module) -> torch.nn.Module:
    """As models are distilled: the same encoder, two of three decoder layers; often of the model's mind, often not."""
    draft = build(lambda: reshape(decoder_layers=2), seed=3)
    weights = draft.state_dict()
    draft.load_state_dict({name: value for name, value in whisper.state_dict().items() if name in weights})
    return draft


def disturb(whisper: torch.nn.Module) -> torch.nn.Module:
    """Another encoder, and a decoder that is right about as often as wrong."""
    draft = copy.deepcopy(whisper)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter += 0.002 * torch.randn(parameter.shape, generator=generator)
    return draft


DRAFTS = {
    "same": copy.deepcopy,
    "distilled": distil,
    "akin": disturb,
    "stranger": lambda _: build(lambda: reshape(encoder_layers=1, decoder_layers=1, decoder_ffn_dim=32), seed=9),
}


@pytest.fixture
def speculation(whisper, tmp_path):
    """`speculation("same", tokens=5)`: the option as it is written for a draft model of that kind."""

    def write(kind: str, tokens: int = 5) -> dict[str, object]:
        folder = tmp_path / kind
        if not folder.exists():
            DRAFTS[kind](whisper).save_pretrained(folder)
        return {"drafter": "model", "model": str(folder), "tokens": tokens}

    return write


def submit_all(driver, transcribe, sound) -> list[str]:
    """Recordings of every kind at once, that join at different steps: the names of their jobs."""
    kinds = [
        {"language": "en"},
        {"prompt": [10, 11], "hotwords": [20]},
        {"language": "de", "words": True},
        {"language": "en", "seek": True, "remembers": True},
        {"language": "fr", "temperature": 0.8, "best_of": 2},
        {"language": "en", "beam_size": 2},
    ]
    for number, work in enumerate(kinds):
        seconds = 2.3 if "seek" in work else 0.4 + 0.1 * number
        transcribe(driver, str(number), sound(number, seconds=seconds), ["transcribe", "translate"][number % 2], **work)
        driver.run(number)
    return [str(number) for number in range(len(kinds))]


def check_same(bold, plain, jobs: list[str]) -> None:
    for job in jobs:
        ours, theirs = (driver.outputs(job, "window", WindowText) for driver in (bold, plain))
        assert len(ours) == len(theirs) > 0
        for our, their in zip(ours, theirs):
            assert (our.tokens, our.language, our.temperature) == (their.tokens, their.language, their.temperature), job
            assert our.avg_logprob == pytest.approx(their.avg_logprob, abs=1e-4)
            assert our.no_speech_prob == pytest.approx(their.no_speech_prob, rel=1e-3)
            assert our.bounds == their.bounds


def count_guesses(driver, jobs: list[str]) -> tuple[int, int]:
    receipts = [driver.receipt(job) for job in jobs]
    return sum(each.guessed_units for each in receipts), sum(each.accepted_units for each in receipts)


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        (LaggedCpu, "distilled"),
        (Device, "akin"),
        *(pytest.param(Device, kind, marks=pytest.mark.slow) for kind in ("same", "distilled", "stranger")),
        *(pytest.param(LaggedCpu, kind, marks=pytest.mark.slow) for kind in ("same", "akin", "stranger")),
    ],
)
def test_every_kind_of_recording_has_the_text_it_has_without(device, kind, drive, transcribe, sound, speculation):
    plain, bold = drive(), drive(device, speculation=speculation(kind))
    for driver in (plain, bold):
        jobs = submit_all(driver, transcribe, sound)
        driver.finish()
    check_same(bold, plain, jobs)
    guessed, accepted = count_guesses(bold, jobs)
    assert guessed > 0 and accepted <= guessed and count_guesses(plain, jobs) == (0, 0)
    stats = bold.loop.stats()
    assert (stats["guessed_tokens_total"], stats["accepted_tokens_total"]) == (guessed, accepted)


def test_looking_back_works_without_a_second_model(drive, transcribe, sound):
    plain, bold = drive(), drive(speculation=6)
    for driver in (plain, bold):
        jobs = submit_all(driver, transcribe, sound)
        driver.finish()
    check_same(bold, plain, jobs)
    assert count_guesses(bold, jobs)[0] > 0


@pytest.mark.parametrize(
    ("device", "kind"), [(Device, "distilled"), pytest.param(LaggedCpu, "same", marks=pytest.mark.slow)]
)
def test_fallbacks_draw_the_same_and_preempted_rows_go_on(device, kind, drive, transcribe, sound, speculation):
    """Too small a cache for all at once; every window is tried at three temperatures."""
    plain = drive(fallback=EAGER)
    small = {"superpage": 1 << 17, "cache_bytes": (1 << 17) * 7}
    bold = drive(device, fallback=EAGER, speculation=speculation(kind, tokens=3), **small)
    for driver in (plain, bold):
        for number in range(5):
            transcribe(driver, str(number), sound(number), language="en")
        driver.finish()
    check_same(bold, plain, list("01234"))
    assert bold.loop.stats()["preemptions_total"] > 0


@both_devices
@pytest.mark.parametrize("steps", [1, 3, 5, 8, 13])
def test_cancelled_at_any_step_nothing_is_left(device, steps, drive, transcribe, sound, reference, speculation):
    driver = drive(device, speculation=speculation("distilled"))
    transcribe(driver, "leaver", sound(0, seconds=5.0))
    transcribe(driver, "stayer", sound(1), language="en")
    driver.run(steps=steps)
    driver.cancel("leaver")
    driver.finish()
    (text,) = driver.outputs("stayer", "window", WindowText)
    assert text.tokens == reference.generate(sound(1), [81, 82, 86])


def test_a_draft_of_the_same_mind_is_always_right_under_the_rules_and_saves_passes(
    drive, transcribe, sound, speculation
):
    """Its draws are ruled like the model's: what timestamps forbid is not guessed."""
    drivers = [drive(), drive(speculation=speculation("same"))]
    for driver in drivers:
        transcribe(driver, "one", sound(1), language="en")
        driver.finish()
    plain, bold = drivers
    check_same(bold, plain, ["one"])
    guessed, accepted = count_guesses(bold, ["one"])
    assert guessed - accepted <= 5, "only what is guessed behind the end is wrong"
    assert accepted > 20
    assert plain.loop.launches / bold.loop.launches > 3


def test_one_pass_of_the_encoder_where_both_models_have_the_same(whisper, monkeypatch):
    """A distilled decoder adds its layers to the slab; another encoder runs beside the model's own."""
    passes: list[Encoder] = []
    run = Encoder.run
    monkeypatch.setattr(Encoder, "run", lambda self, features: passes.append(self) or run(self, features))
    for kind, ears in {"same": 1, "distilled": 1, "akin": 2, "stranger": 2}.items():
        draft = DRAFTS[kind](whisper)
        assert same_weights(whisper.model.encoder, draft.model.encoder) == (ears == 1)
        encoder, _ = split_whisper(copy.deepcopy(whisper))
        assert encoder.attach(draft) == 3
        assert encoder.slab.shape[0] == 3 + draft.config.decoder_layers
        slab = torch.zeros(1, *encoder.slab.shape)
        with torch.inference_mode():
            passes.clear()
            encoder.forward([torch.zeros(8_000).numpy()], [slab[0]])
        assert len(passes) == ears
        alone = WhisperEncoder(DRAFTS[kind](whisper))
        expected = torch.zeros(1, *alone.slab.shape)
        with torch.inference_mode():
            alone.forward([torch.zeros(8_000).numpy()], [expected[0]])
        torch.testing.assert_close(slab[:, 3:], expected)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"vocab_size": 150}, "150 tokens"),
        ({"num_mel_bins": 128}, "128 mel bins"),
        ({"d_model": 64}, "64 numbers in a state"),
        ({"decoder_attention_heads": 2}, "2 heads"),
        ({"max_source_positions": 25}, "25 positions in a window"),
        ({"max_target_positions": 32}, "context is 32 tokens"),
    ],
)
def test_a_draft_that_does_not_fit_is_refused(changes, reason, drive, tmp_path):
    build(lambda: reshape(**changes)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"draft model.* {reason}"):
        drive(speculation={"drafter": "model", "model": str(tmp_path)})


def test_a_draft_that_is_no_whisper_is_refused(drive, tmp_path):
    build(tiny_llama).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="no Whisper, but of type 'llama'"):
        drive(speculation={"drafter": "model", "model": str(tmp_path)})
    with pytest.raises(ModelError, match="cannot load"):
        drive(speculation={"drafter": "model", "model": str(tmp_path / "nowhere")})


@pytest.mark.slow
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_the_starter_says_the_same_with_a_part_of_itself_as_its_draft(quantization, tmp_path):
    """From its options to its words: recordings at once, and one that is heard while it lasts."""
    hibari = pytest.importorskip("hibari", reason="pip install hibari-tts")
    polymux_starter = pytest.importorskip("polymux_starter")
    starter = polymux_starter.TRANSCRIBE
    files = resolve(starter.reference, sha256=starter.sha256)
    draft = load_whisper(files.folder, torch.device("cpu"), torch.float32)
    draft.model.decoder.layers = draft.model.decoder.layers[:3]
    draft.config.decoder_layers = 3
    draft.save_pretrained(tmp_path)
    sentences = ["The morning train was late.", "Rain fell on the quiet harbor, and the door was still open."]
    spoken = [np.concatenate(list(hibari.Hibari().stream(text))) for text in sentences]
    sounds = [np.concatenate(list(read_audio(write_wav(sound, 24_000)))) for sound in spoken]
    drivers = []
    for speculation in (None, {"drafter": "model", "model": str(tmp_path), "tokens": 4}):
        site = Site(settings=SiteSettings(cache_bytes=1 << 28))
        options = {**starter.options, "quantization": quantization, "speculation": speculation}
        driver = Driver(Loop(site, {"whisper": Transcription().load(files, site, options)}))
        for number, samples in enumerate(sounds):
            driver.submit(str(number), "whisper", "transcribe", TranscribeWork(language="en", words=True))
            driver.post(str(number), AudioChunk(samples, last=True))
        driver.submit("live", "whisper", "listen", ListenWork(language="en"))
        for start in range(0, len(sounds[1]), 8_000):
            driver.post("live", Hear(sounds[1][start : start + 8_000]))
            driver.run()
        driver.post("live", Commit())
        driver.post("live", Leave())
        driver.finish()
        drivers.append(driver)
    plain, bold = drivers
    check_same(bold, plain, ["0", "1"])
    written = [driver.outputs("live", "Written", Written) for driver in drivers]
    assert written[0] == written[1] and sum(len(each.tokens) for each in written[0]) > 8
    for job in ("0", "1", "live"):
        receipt = bold.receipt(job)
        assert receipt is not None and receipt.guessed_units > receipt.accepted_units >= 0


class Looking(SdpaAttention):
    """The reference, which looks on the host, in launches of which only the device knows: it looks there."""

    recordable = True

    def write(self, key, value, cache, batch):
        here = batch.positions >= 0
        slots, positions = batch.token_slots[here], batch.positions[here]
        blocks = batch.tables[slots, positions // batch.block]
        cache[blocks, 0, positions % batch.block] = key[here]
        cache[blocks, 1, positions % batch.block] = value[here]

    def paged(self, query, cache, batch, options):
        lengths = batch.row_lengths.clamp(min=1).tolist()
        return super().paged(query, cache, replace(batch, lengths=lengths, memo={}), options)

    def cross(self, query, slabs, batch, options):
        read = batch.slab_table[batch.slots, 0].tolist()
        return super().cross(query, slabs, replace(batch, slabs=read, slab_units=[]), options)


class Rerun:
    """In the place of a recording."""

    def __init__(self, step, pool):
        self.step, self.outputs = step, step()

    def replay(self):
        self.outputs = self.step()


@pytest.mark.parametrize("kind", ["distilled", pytest.param("same", marks=pytest.mark.slow), "akin"])
def test_recorded_rounds_say_the_same(kind, drive, transcribe, sound, speculation, monkeypatch):
    """Guesses, their check and the draws are one launch; rows that a recording cannot serve run beside it."""
    monkeypatch.setattr("polymux.core.compute.sdpa.SdpaAttention", Looking)
    monkeypatch.setattr("polymux.core.batch.rounds.record", Rerun)
    rounds: list[int] = []
    launch = GuessRounds.launch
    monkeypatch.setattr(
        GuessRounds, "launch", lambda self, plan, rows: rounds.append(len(rows)) or launch(self, plan, rows)
    )
    plain, bold = drive(), drive(speculation=speculation(kind, tokens=3))
    stage = bold.loop.programs["whisper"].hearing.decoder
    stage._rounds = stage._drafter.open_rounds(stage.model, stage.max_rows)
    for driver in (plain, bold):
        for number in range(5):
            transcribe(driver, str(number), sound(number), language="en")
            driver.run(number)
        driver.finish()
    check_same(bold, plain, list("01234"))
    guessed, accepted = count_guesses(bold, list("01234"))
    assert 0 < accepted <= guessed, (guessed, accepted, rounds)
    assert {1, 2, 3} & set(rounds) and max(rounds) > 3
    jobs = submit_all(bold, transcribe, sound) if kind == "akin" else []
    bold.finish()
    assert all(bold.outputs(job, "window", WindowText) for job in jobs)
