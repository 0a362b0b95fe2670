"""Reranking: packed batches of pairs score as transformers would one by one, and the gateway orders them."""

from __future__ import annotations

import copy
from functools import cache
from random import Random
from typing import Any

import httpx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForSequenceClassification,
    ModernBertConfig,
    ModernBertForSequenceClassification,
    Qwen3Config,
    Qwen3ForSequenceClassification,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.service import Served, Service
from polymux.core.tasks import Score
from polymux.core.testing import tokenizers
from polymux.core.testing.drive import Driver
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.tiny import VOCABULARY, build
from polymux.core.text.tokenizer import Tokenizer
from polymux.gateway.app import create_app
from polymux.modalities.llm.crossencoder import CrossEncoder
from polymux.modalities.llm.program import RankingProgram
from polymux.modalities.llm.ranking import RankFront
from polymux.modalities.llm.work import SCORE, RankWork

SHAPE: dict[str, Any] = {
    "vocab_size": 160,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "num_labels": 1,
}
DISTIL = {"vocab_size": 160, "dim": 32, "hidden_dim": 64, "n_layers": 2, "n_heads": 4, "num_labels": 1}


def roberta() -> torch.nn.Module:
    return RobertaForSequenceClassification(RobertaConfig(**{**SHAPE, "pad_token_id": 1}, type_vocab_size=1))


def modernbert(pooling: str) -> torch.nn.Module:
    marks = {"cls_token_id": 2, "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3}
    return ModernBertForSequenceClassification(ModernBertConfig(**SHAPE, **marks, classifier_pooling=pooling))


MODELS: dict[str, Any] = {
    "bert": lambda: BertForSequenceClassification(BertConfig(**SHAPE)),
    "roberta": roberta,
    "distilbert": lambda: DistilBertForSequenceClassification(DistilBertConfig(**DISTIL)),
    "modernbert": lambda: modernbert("cls"),
    "modernbert-mean": lambda: modernbert("mean"),
    "qwen3": lambda: Qwen3ForSequenceClassification(Qwen3Config(**SHAPE, num_key_value_heads=2, head_dim=16)),
}


@cache
def model_of(name: str) -> torch.nn.Module:
    model = build(MODELS[name])
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)  # scores away from 0 and 1
    return model


def open_site(lagged: bool = False) -> Site:
    return Site(LaggedCpu() if lagged else Device(), SiteSettings(cache_bytes=1 << 20, superpage=1 << 16))


def make_program(name: str, site: Site, units: int = 4096) -> RankingProgram:
    encoder = CrossEncoder(copy.deepcopy(model_of(name)), site)
    return RankingProgram(OneShotStage("rank", encoder, site, max_units=units, to_host=True), encoder)


def score_alone(name: str, ids: list[int], segments: list[int]) -> float:
    inputs = {"token_type_ids": torch.tensor([segments])} if name == "bert" else {}
    with torch.inference_mode():
        return model_of(name)(input_ids=torch.tensor([ids]), **inputs).logits.sigmoid().item()


@pytest.mark.parametrize("name", MODELS)
@settings(max_examples=8, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=6),
    lagged=st.booleans(),
    units=st.sampled_from([10, 4096]),
    seed=st.integers(0, 99),
)
def test_scores_are_the_models_own(
    name: str, lengths: list[tuple[int, int]], lagged: bool, units: int, seed: int
) -> None:
    random = Random(seed)
    pairs = [
        ([random.randrange(5, VOCABULARY) for _ in range(first + second)], [0] * first + [1] * second)
        for first, second in lengths
    ]
    site = open_site(lagged)
    driver = Driver(Loop(site, {"m": make_program(name, site, units)}))
    work = RankWork(inputs=[ids for ids, _ in pairs], segments=[segments for _, segments in pairs])
    driver.submit("a", "m", "rank", work)
    driver.finish()
    scores = {score.index: score.score for score in driver.outputs("a", SCORE, Score)}
    expected = [score_alone(name, ids, segments) for ids, segments in pairs]
    assert [scores[i] for i in range(len(pairs))] == pytest.approx(expected, abs=1e-5)


@pytest.mark.anyio
async def test_the_gateway_orders_and_scores() -> None:
    tokenizer = Tokenizer(pair_tokenizer())
    site = open_site()
    front = RankFront(tokenizer, 32, 160)
    engine = LocalEngine({"r": make_program("bert", site)}, site)
    service = Service([Served("r", ("rank", "tokenize", "detokenize"), front, engine)])
    await service.start()
    await service.wait_ready()
    documents = ["the dog", "Paris is the capital", "the quick brown fox", "the dog"]
    try:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(service)), base_url="http://r") as http:
            body = {"model": "r", "query": "which fox", "documents": documents}
            ranked = (await http.post("/v1/rerank", json=body)).json()["results"]
            scored = await http.post("/v1/score", json={"model": "r", "text_1": "which fox", "text_2": documents})
            scores = [item["score"] for item in scored.json()["data"]]
            assert sorted(scores, reverse=True) == [result["relevance_score"] for result in ranked]
            for result in ranked:
                assert result["relevance_score"] == scores[result["index"]]
                assert result["document"]["text"] == documents[result["index"]]
            top = (await http.post("/rerank", json={**body, "top_n": 2, "return_documents": False})).json()["results"]
            assert [r["index"] for r in top] == [r["index"] for r in ranked[:2]] and "document" not in top[0]
            objects = {**body, "documents": [{"text": text} for text in documents]}
            assert (await http.post("/v1/rerank", json=objects)).json()["results"] == ranked
            for change in (
                {"documents": []},
                {"documents": ["the dog " * 40]},
                {"query": ""},
                {"documents": ["x", 5]},
                {"top_n": 0},
            ):
                refused = await http.post("/v1/rerank", json={**body, **change})
                assert refused.status_code == 400 and refused.json()["error"]["param"]
            cut = await http.post("/v1/rerank", json={**body, "documents": ["the dog " * 40], "truncate": True})
            assert cut.status_code == 200
            spelled = (await http.post("/tokenize", json={"model": "r", "prompt": "the fox"})).json()
            assert spelled["tokens"] == tokenizer.encode("the fox") and spelled["max_model_len"] == 32
    finally:
        await service.stop()


def pair_tokenizer() -> Any:
    """WordPiece that knows how BERT reads a pair."""
    from tokenizers import processors

    backend = tokenizers.wordpiece()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    return backend


def test_only_the_second_text_of_a_pair_is_cut() -> None:
    tokenizer = Tokenizer(pair_tokenizer())
    whole, segments = tokenizer.encode_pair("the fox", "the quick brown dog")
    cut, cut_segments = tokenizer.encode_pair("the fox", "the quick brown dog", longest=len(whole) - 2)
    assert len(cut) == len(whole) - 2
    assert cut[:-1] == whole[: len(cut) - 1]
    assert segments.count(0) == cut_segments.count(0)
