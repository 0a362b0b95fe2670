"""Large-, turbo- and distil-class models load from their folders and say what transformers' own do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import WhisperForConditionalGeneration

from polymux.core.compute.device import LaggedCpu
from polymux.core.compute.quantization import find_quantization
from polymux.core.testing.tiny import build, tiny_whisper
from polymux.modalities.asr.alignment import choose_heads
from polymux.modalities.asr.policies import AlignAtt, LocalAgreement, choose_policy
from polymux.modalities.asr.tokens import list_languages
from polymux.modalities.asr.whisper import load_whisper, split_whisper
from polymux.modalities.asr.work import WindowText

SHAPES: dict[str, dict[str, Any]] = {
    "large-v3": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 4},
    "turbo": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 1},
    "distil-large-v3": {"num_mel_bins": 128, "encoder_layers": 4, "decoder_layers": 2},
    "distil-small": {"encoder_layers": 3, "decoder_layers": 2, "encoder_ffn_dim": 96},
    "scaled embedding": {"scale_embedding": True},
}
"""What tells them apart, in miniature."""


def shape_whisper(**changes: Any) -> torch.nn.Module:
    config = tiny_whisper().config
    for name, value in changes.items():
        setattr(config, name, value)
    return WhisperForConditionalGeneration(config)


@pytest.fixture(params=SHAPES)
def model(request: pytest.FixtureRequest) -> torch.nn.Module:
    return build(lambda: shape_whisper(**SHAPES[request.param]), seed=3)


def test_it_says_what_transformers_says(model, drive, transcribe, sound, request):
    """Words and their times come along: no shape is without heads to align by."""
    reference = type(request.getfixturevalue("reference"))(model)
    driver = drive(LaggedCpu, model=model)
    expected = {}
    for number in range(3):
        samples = sound(number, seconds=0.5 + 0.2 * number)
        expected[str(number)] = reference.generate(samples, [81, 83, 85])
        transcribe(driver, str(number), samples, "translate", language="de", words=True)
    driver.finish()
    for job, tokens in expected.items():
        (window,) = driver.outputs(job, "window", WindowText)
        assert window.tokens == tokens
        assert len(window.bounds) == sum(token < 90 for token in tokens) + 1
        assert window.bounds == sorted(window.bounds)


@pytest.mark.parametrize("quantization", [None, "int8"])
def test_it_loads_from_its_folder(model, tmp_path, quantization):
    model.save_pretrained(tmp_path)
    device = torch.device("cpu")
    loaded = load_whisper(tmp_path, device, torch.float32)
    encoder, decoder = split_whisper(loaded, find_quantization(quantization, device))
    encoder.settle()
    config = model.config
    assert decoder.shape.layers == len(decoder.layers) == config.decoder_layers
    assert encoder.slab.shape[0] == config.decoder_layers
    assert encoder.features.filters.shape[0] == config.num_mel_bins


def test_what_is_told_while_it_lasts_is_chosen_by_shape():
    """Decoders that were cut down follow the sound badly: they agree with themselves instead."""
    assert isinstance(choose_policy(None, aligned=True)(), AlignAtt)
    assert isinstance(choose_policy(None, aligned=False)(), LocalAgreement)
    assert choose_heads([[2, 3], [0, 1]], 4, 20) == [(2, 3), (0, 1)]
    assert choose_heads(None, 2, 2) == [(1, 0), (1, 1)]
    assert choose_heads(None, 1, 2) == [(0, 0), (0, 1)]


@pytest.mark.parametrize("count", [99, 100])
def test_every_language_that_a_model_names(count):
    """large-v3 knows one more than the models before it."""
    codes = [f"{chr(97 + number // 26)}{chr(97 + number % 26)}" for number in range(count)]
    listed = {f"<|{code}|>": 50259 + number for number, code in enumerate(codes)}
    found = list_languages({"is_multilingual": True, "lang_to_id": listed}, None)
    assert found == {code: 50259 + number for number, code in enumerate(codes)}
    assert list_languages({"is_multilingual": False, "lang_to_id": listed}, None) == {}
