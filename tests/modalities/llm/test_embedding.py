"""Embedding: packed batches of any mix of lengths equal transformers one text at a time, within 1e-5."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    DistilBertConfig,
    DistilBertModel,
    ModernBertConfig,
    ModernBertModel,
    Qwen3Config,
    Qwen3Model,
    RobertaConfig,
    RobertaModel,
)

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.compute.body import Body
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.load import prepare_body
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import VOCABULARY, build, tiny_bert
from polymux.modalities.llm.embedder import TextEmbedder
from polymux.modalities.llm.program import EmbeddingProgram
from polymux.modalities.llm.work import VECTORS, EmbedWork, Vectors

LONGEST = 40

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_roberta() -> torch.nn.Module:
    """Positions are numbered from behind the padding index."""
    return RobertaModel(RobertaConfig(**{**_SHAPE, "pad_token_id": 1, "bos_token_id": 0}))


def tiny_distilbert() -> torch.nn.Module:
    """No token types."""
    return DistilBertModel(
        DistilBertConfig(
            vocab_size=VOCABULARY, dim=32, hidden_dim=64, n_layers=3, n_heads=4, max_position_embeddings=128
        )
    )


def tiny_modernbert() -> torch.nn.Module:
    """Bidirectional windows in two layers of three, rotary positions."""
    return ModernBertModel(ModernBertConfig(**_SHAPE, local_attention=8, cls_token_id=3, sep_token_id=4))


def tiny_decoder() -> torch.nn.Module:
    """A decoder read at its last token, like Qwen3-Embedding."""
    return Qwen3Model(Qwen3Config(**_SHAPE, num_key_value_heads=2, head_dim=16))


MODELS: dict[str, tuple[Callable[[], torch.nn.Module], str]] = {
    "bert": (tiny_bert, "mean"),
    "bert cls": (tiny_bert, "cls"),
    "roberta": (tiny_roberta, "mean"),
    "distilbert": (tiny_distilbert, "mean"),
    "modernbert": (tiny_modernbert, "mean"),
    "qwen3": (tiny_decoder, "last"),
}


@cache
def models_of(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """The same model twice: for us, and as transformers has it."""
    model = build(MODELS[name][0])
    return copy.deepcopy(model), model


@cache
def body_of(name: str, tier: str) -> Body:
    return prepare_body(models_of(name)[0], tier=tier)


def embed_alone(name: str, ids: list[int], dimensions: int | None = None) -> np.ndarray:
    with torch.inference_mode():
        inputs = torch.tensor([ids])
        hidden = models_of(name)[1](input_ids=inputs, attention_mask=torch.ones_like(inputs)).last_hidden_state[0]
    pooling = MODELS[name][1]
    vector = {"mean": hidden.mean(0), "cls": hidden[0], "last": hidden[-1]}[pooling].numpy()[:dimensions]
    return vector / np.linalg.norm(vector)


def open_engine(name: str, device: Device, *, units: int = 64, tier: str = "fast") -> Driver:
    site = Site(device, SiteSettings(cache_bytes=1 << 16, superpage=1 << 14))
    embedder = TextEmbedder(body_of(name, tier), site, MODELS[name][1])
    stage = OneShotStage("embed", embedder, site, max_units=units, to_host=True)
    return Driver(Loop(site, {"m": EmbeddingProgram(stage, embedder)}))


def texts_of(lengths: list[int]) -> list[list[int]]:
    random = Random(sum(lengths))
    return [[random.randrange(5, VOCABULARY) for _ in range(length)] for length in lengths]


def vectors_of(driver: Driver, job: str) -> list[np.ndarray]:
    answers = [vector for part in driver.outputs(job, VECTORS, Vectors) for vector in part.split()]
    return [np.frombuffer(answer.data, "<f4") for answer in answers]


@pytest.mark.parametrize("tier", ["fast", "reference"])
@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(
    jobs=st.lists(st.lists(st.integers(1, LONGEST), min_size=1, max_size=5), min_size=1, max_size=4),
    units=st.sampled_from([1, 30, 500]),
    lagged=st.booleans(),
)
def test_packed_texts_equal_texts_alone(name: str, tier: str, jobs: list[list[int]], units: int, lagged: bool) -> None:
    driver = open_engine(name, LaggedCpu() if lagged else Device(), units=units, tier=tier)
    for number, lengths in enumerate(jobs):
        driver.submit(str(number), "m", "embed", EmbedWork.of(texts_of(lengths)))
        if number % 2:
            driver.step()
    driver.finish()
    for number, lengths in enumerate(jobs):
        vectors = vectors_of(driver, str(number))
        assert len(vectors) == len(lengths)
        for vector, ids in zip(vectors, texts_of(lengths)):
            np.testing.assert_allclose(vector, embed_alone(name, ids), atol=1e-5)
        receipt = driver.receipt(str(number))
        assert receipt is not None and receipt.input_units == sum(lengths)


def test_fewer_dimensions_are_cut_and_then_normalised() -> None:
    """Matryoshka: the first values, of unit length again; unit length can be switched off."""
    driver = open_engine("bert", Device())
    texts = texts_of([9, 3])
    driver.submit("cut", "m", "embed", EmbedWork.of(texts, dimensions=8))
    driver.submit("raw", "m", "embed", EmbedWork.of(texts, normalize=False))
    driver.finish()
    for ids, cut, raw in zip(texts, vectors_of(driver, "cut"), vectors_of(driver, "raw")):
        np.testing.assert_allclose(cut, embed_alone("bert", ids, 8), atol=1e-5)
        assert np.linalg.norm(cut) == pytest.approx(1.0, abs=1e-5)
        np.testing.assert_allclose(raw / np.linalg.norm(raw), embed_alone("bert", ids), atol=1e-5)
        assert abs(np.linalg.norm(raw) - 1.0) > 0.1


@pytest.mark.parametrize("tier", ["fast", "reference"])
def test_a_text_without_finite_vectors_fails_alone(tier: str) -> None:
    """Its neighbours in the same pass have theirs."""
    model = copy.deepcopy(models_of("bert")[1])
    site = Site(Device(), SiteSettings(cache_bytes=1 << 16, superpage=1 << 14))
    embedder = TextEmbedder(prepare_body(model, tier=tier), site, "mean")
    with torch.no_grad():
        model.embeddings.word_embeddings.weight[7] = float("nan")
    stage = OneShotStage("embed", embedder, site, max_units=4096, to_host=True)
    driver = Driver(Loop(site, {"m": EmbeddingProgram(stage, embedder)}))
    texts = [[5, 6], [8, 9, 10]]
    driver.submit("good", "m", "embed", EmbedWork.of(texts))
    driver.submit("bad", "m", "embed", EmbedWork.of([[5, 7]]))
    driver.finish()
    assert "not finite" in str(driver.error("bad"))
    for ids, vector in zip(texts, vectors_of(driver, "good")):
        np.testing.assert_allclose(vector, embed_alone("bert", ids), atol=1e-5)


def test_a_cancelled_embedding_leaves_nothing() -> None:
    driver = open_engine("bert", LaggedCpu(), units=8)
    driver.submit("it", "m", "embed", EmbedWork.of(texts_of([LONGEST] * 200)))
    driver.run(steps=3)
    driver.cancel("it")
    driver.finish()
    assert driver.receipt("it") is None


@pytest.mark.parametrize("name", MODELS)
def test_what_is_tried_before_the_first_request_fits_the_model(name: str) -> None:
    embedder = open_engine(name, Device()).loop.programs["m"].stage.model  # type: ignore[attr-defined]
    with torch.inference_mode():
        embedder.rehearse(4096)
