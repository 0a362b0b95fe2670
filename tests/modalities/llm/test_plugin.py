"""Which models the text pipelines take, judged from small files alone, and what their fronts read from those."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polymux.core.errors import ModelError
from polymux.core.models import ModelFiles
from polymux.core.models.cache import find_home
from polymux.core.tasks import Chat, Embed
from polymux.core.testing import tokenizers as small
from polymux.modalities.llm.plugin import TextEmbedding, TextGeneration, pipelines

GENERATION, EMBEDDING = TextGeneration(), TextEmbedding()

DECODER = {"architectures": ["LlamaForCausalLM"], "vocab_size": 500, "max_position_embeddings": 64, "hidden_size": 8}
ENCODER = {"architectures": ["BertModel"], "vocab_size": 500, "max_position_embeddings": 64, "hidden_size": 8}


def write_model(folder: Path, config: dict[str, Any], **files: Any) -> ModelFiles:
    """A model folder with everything but weights. `files`: name without .json -> its object."""
    small.wordpiece().save(str(folder / "tokenizer.json"))
    for name, value in {"config": config, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(value))
    return ModelFiles("mine", folder)


@pytest.mark.parametrize(
    ("config", "published", "expected"),
    [
        (DECODER, False, "text-generation"),
        (DECODER | {"architectures": ["GPT2LMHeadModel"]}, False, "text-generation"),
        (DECODER, True, "text-embedding"),
        (DECODER | {"architectures": ["Qwen3Model"]}, False, "text-embedding"),
        (ENCODER, True, "text-embedding"),
        (ENCODER | {"architectures": ["XLMRobertaForMaskedLM"]}, False, "text-embedding"),
        (ENCODER | {"architectures": ["WhisperForConditionalGeneration"], "is_encoder_decoder": True}, False, None),
        (ENCODER | {"architectures": ["CLIPModel"], "vision_config": {}, "text_config": {}}, False, None),
        (ENCODER | {"architectures": ["BertForSequenceClassification"]}, False, None),
        ({"architectures": ["Wav2Vec2Model"], "hidden_size": 8}, False, None),
        ({}, False, None),
    ],
)
def test_every_model_has_at_most_one_pipeline(tmp_path: Path, config: dict[str, Any], published: bool, expected: str):
    files = write_model(tmp_path, config, **({"modules": {}} if published else {}))
    assert [each.name for each in pipelines() if each.accepts(files)] == ([expected] if expected else [])


def test_the_context_comes_from_the_configuration(tmp_path: Path):
    front = GENERATION.front(write_model(tmp_path, DECODER), {})
    assert front.describe() == {"context_length": 64, "vocabulary": 500, "chat": False, "tools": False, "thinks": False}


def test_the_longest_input_is_what_the_authors_trained_for(tmp_path: Path):
    """all-MiniLM has 512 positions and was trained on 256; RoBERTa has 514 positions and can use 512."""
    files = write_model(tmp_path, ENCODER, tokenizer_config={"model_max_length": 62})
    assert EMBEDDING.front(files, {}).describe() == {"dimensions": 8, "longest_input": 62, "prompts": []}
    files = write_model(tmp_path, ENCODER, sentence_bert_config={"max_seq_length": 32})
    assert EMBEDDING.front(files, {}).describe() == {"dimensions": 8, "longest_input": 32, "prompts": []}
    files = write_model(tmp_path, ENCODER, sentence_bert_config={}, tokenizer_config={"model_max_length": 1e30})
    assert EMBEDDING.front(files, {}).describe() == {"dimensions": 8, "longest_input": 64, "prompts": []}


def test_a_configuration_that_does_not_say_is_a_model_error(tmp_path: Path):
    with pytest.raises(ModelError, match="max_position_embeddings"):
        GENERATION.front(write_model(tmp_path, {"architectures": ["LlamaForCausalLM"], "vocab_size": 5}), {})


def find_starter(part: str) -> ModelFiles:
    for folder in sorted(find_home().glob(f"*/*{part}*")):
        if (path := next(folder.rglob("tokenizer.json"), None)) is not None:
            return ModelFiles(part, path.parent)
    pytest.skip(f"{part} was never fetched on this machine")


def test_the_chat_starters_prompt_is_that_of_transformers():
    transformers = pytest.importorskip("transformers")
    files = find_starter("smollm2")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Où est Paris ? 😀"}]
    theirs = transformers.AutoTokenizer.from_pretrained(files.folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    front = GENERATION.front(files, {})
    work = front.prepare("chat", Chat(messages=messages)).work
    assert work.prompts == [expected]
    assert theirs.eos_token_id in work.stop_token_ids
    assert GENERATION.accepts(files) and not EMBEDDING.accepts(files)


def test_the_embedding_starters_tokens_are_those_of_transformers():
    transformers = pytest.importorskip("transformers")
    files = find_starter("minilm")
    texts = ["Paris is in France.", "naïve 東京 " * 300]
    theirs = transformers.AutoTokenizer.from_pretrained(files.folder)
    front = EMBEDDING.front(files, {})
    longest = front.describe()["longest_input"]
    expected = theirs(texts, truncation=True, max_length=longest)["input_ids"]
    work = front.prepare("embed", Embed(inputs=texts, truncate=True)).work
    assert work.ids.tolist() == [id for ids in expected for id in ids] and work.lengths.tolist() == [
        len(ids) for ids in expected
    ]
    assert EMBEDDING.accepts(files) and not GENERATION.accepts(files)
