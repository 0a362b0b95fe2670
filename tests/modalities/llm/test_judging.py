"""Language models that judge pairs: scores are the softmax over yes and no that transformers gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError, ContextTooLong, ModelError
from polymux.core.models import ModelFiles
from polymux.core.tasks import Rank, Score
from polymux.core.testing import tokenizers
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build
from polymux.modalities.llm.judging import Judge, JudgeFront
from polymux.modalities.llm.plugin import TextGeneration, TextRanking
from polymux.modalities.llm.work import SCORE

WORDS = {"judge": {"yes": "y", "no": "n", "prefix": "Judge. ", "suffix": "? ", "instruction": "be fair"}}
QUERIES = ["where is Paris", "naïve 東京", ""]
DOCUMENTS = ["Paris is in France. " * 3, "no", "🙂"]


def make_model(size: int) -> torch.nn.Module:
    config = Qwen3Config(
        vocab_size=size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )
    model = build(lambda: Qwen3ForCausalLM(config))
    with torch.no_grad():
        model.lm_head.weight *= 0.1  # scores away from 0 and 1
    return model


@pytest.fixture
def files(tmp_path: Path) -> ModelFiles:
    backend = tokenizers.byte_level()
    make_model(backend.get_vocab_size()).save_pretrained(tmp_path)
    backend.save(str(tmp_path / "tokenizer.json"))
    return ModelFiles("judge", tmp_path)


def rank(files: ModelFiles, tier: str, pairs: list[tuple[str, str]]) -> tuple[list[list[int]], dict[int, float]]:
    pipeline = TextRanking()
    options: dict[str, Any] = {**WORDS, "tier": tier, "dtype": "float32"}
    work = pipeline.front(files, options).prepare("rank", Rank(pairs=pairs)).work
    site = Site(settings=SiteSettings(cache_bytes=1 << 20, superpage=1 << 16))
    driver = Driver(Loop(site, {"m": pipeline.load(files, site, options)}))
    driver.submit("a", "m", "rank", work)  # type: ignore[arg-type]
    driver.finish()
    return work.inputs, {each.index: each.score for each in driver.outputs("a", SCORE, Score)}  # type: ignore[union-attr]


@pytest.mark.parametrize("tier", ["reference", "fast"])
def test_scores_are_those_of_transformers(files: ModelFiles, tier: str) -> None:
    pairs = [(query, document) for query in QUERIES for document in DOCUMENTS]
    inputs, scores = rank(files, tier, pairs)
    model = Qwen3ForCausalLM.from_pretrained(files.folder, dtype=torch.float32).eval()
    front = TextRanking().front(files, WORDS)
    words = list(Judge.read(WORDS).find_words(front.tokenizer))  # type: ignore[attr-defined]
    for index, ids in enumerate(inputs):
        with torch.inference_mode():
            chances = model(torch.tensor([ids])).logits[0, -1, words].softmax(dim=-1)
        assert scores[index] == pytest.approx(chances[0].item(), abs=1e-4)
    assert len({round(score, 3) for score in scores.values()}) > 4


def test_the_judge_is_asked_in_the_models_words(files: ModelFiles) -> None:
    front = TextRanking().front(files, WORDS)
    assert isinstance(front, JudgeFront)
    [ids] = front.prepare("rank", Rank(pairs=[("q", "d")])).work.inputs  # type: ignore[union-attr]
    parts = "Judge. ", "<Instruct>: be fair\n<Query>: q\n<Document>: d", "? "
    assert ids == [id for part in parts for id in front.tokenizer.encode(part, special=False)]


def test_a_document_that_is_too_long_is_refused_or_cut(files: ModelFiles) -> None:
    front = TextRanking().front(files, WORDS)
    long = "abc " * 500
    with pytest.raises(ContextTooLong):
        front.prepare("rank", Rank(pairs=[("q", long)]))
    [ids] = front.prepare("rank", Rank(pairs=[("q", long)], truncate=True)).work.inputs  # type: ignore[union-attr]
    [whole] = front.prepare("rank", Rank(pairs=[("q", "")])).work.inputs  # type: ignore[union-attr]
    assert len(ids) == 512 and ids[-2:] == whole[-2:]
    with pytest.raises(ContextTooLong):
        front.prepare("rank", Rank(pairs=[(long, "d")], truncate=True))


def test_a_language_model_judges_only_when_it_is_told_to(files: ModelFiles) -> None:
    assert TextGeneration().accepts(files) and not TextRanking().accepts(files)


@pytest.mark.parametrize("judge", [{"yes": 1}, {"maybe": "x"}, "yes"])
def test_words_that_make_no_sense_are_refused(files: ModelFiles, judge: Any) -> None:
    with pytest.raises(ConfigError, match="judge"):
        TextRanking().front(files, {"judge": judge})


def test_a_model_without_the_words_cannot_judge(files: ModelFiles) -> None:
    with pytest.raises(ModelError, match="cannot judge"):
        TextRanking().front(files, {"judge": {"yes": "indubitably"}})
