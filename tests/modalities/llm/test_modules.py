"""What comes after an embedder's transformer is read from its own files, and computed as those files say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from polymux.core.compute.device import Device
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.models import ModelFiles
from polymux.core.tasks import Embed
from polymux.core.testing import tokenizers
from polymux.core.testing.tiny import build, tiny_bert
from polymux.core.text.flat import flatten
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.llm.embedder import EmbedItem, TextEmbedder
from polymux.modalities.llm.embedding import EmbedFront
from polymux.modalities.llm.modules import Prompts, read_modules, read_prompts

TEXTS = [[5, 6, 7, 8], [9], [10, 11]]


def write_folder(folder: Path, pooling: dict[str, Any], dense: str | None = None, width: int = 32) -> ModelFiles:
    """A sentence-transformers folder around the tiny BERT."""
    modules = [{"type": "sentence_transformers.models.Transformer", "path": ""}]
    modules.append({"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"})
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    if dense is not None:
        modules.append({"type": "sentence_transformers.models.Dense", "path": "2_Dense"})
        (folder / "2_Dense").mkdir()
        config = {"in_features": width, "out_features": 6, "bias": True, "activation_function": dense}
        (folder / "2_Dense" / "config.json").write_text(json.dumps(config))
        torch.manual_seed(3)
        weights = {"linear.weight": torch.randn(6, width), "linear.bias": torch.randn(6)}
        save_file(weights, folder / "2_Dense" / "model.safetensors")
    modules.append({"type": "sentence_transformers.models.Normalize", "path": "3_Normalize"})
    (folder / "modules.json").write_text(json.dumps(modules))
    build(tiny_bert).save_pretrained(folder)
    return ModelFiles("tiny", folder)


EXPECTED = {
    "cls_token": lambda hidden: hidden[0],
    "lasttoken": lambda hidden: hidden[-1],
    "max_tokens": lambda hidden: hidden.max(dim=0).values,
    "mean_tokens": lambda hidden: hidden.mean(dim=0),
    "mean_sqrt_len_tokens": lambda hidden: hidden.sum(dim=0) / len(hidden) ** 0.5,
    "weightedmean_tokens": lambda hidden: (
        sum((i + 1) * row for i, row in enumerate(hidden)) / sum(range(1, len(hidden) + 1))
    ),
}


@pytest.mark.parametrize("chosen", [*([name] for name in EXPECTED), ["cls_token", "mean_tokens"]], ids="+".join)
@pytest.mark.parametrize("dense", [None, "torch.nn.modules.activation.Tanh", "torch.nn.modules.linear.Identity"])
def test_vectors_are_those_of_the_modules(tmp_path: Path, chosen: list[str], dense: str | None) -> None:
    files = write_folder(
        tmp_path, {f"pooling_mode_{name}": name in chosen for name in EXPECTED}, dense, 32 * len(chosen)
    )
    site = Site(Device(), SiteSettings(cache_bytes=1 << 20, superpage=1 << 16))
    embedder = TextEmbedder.load(files, site, torch.float32)
    with torch.inference_mode():
        vectors = embedder.forward([EmbedItem(*flatten(TEXTS), None, True)], [])[0]
        for ids, vector in zip(TEXTS, vectors):
            hidden = build(tiny_bert)(input_ids=torch.tensor([ids])).last_hidden_state[0]
            expected = torch.cat([EXPECTED[name](hidden) for name in EXPECTED if name in chosen])
            if dense is not None:
                torch.manual_seed(3)
                expected = torch.randn(6, 32 * len(chosen)) @ expected + torch.randn(6)
                expected = expected.tanh() if dense.endswith("Tanh") else expected
            torch.testing.assert_close(vector, torch.nn.functional.normalize(expected, dim=0), atol=1e-5, rtol=0)
            assert len(vector) == embedder.dimensions == read_modules(files).width(32)


@pytest.mark.parametrize(
    ("pooling", "dense"),
    [
        ({"pooling_mode_attention": True}, None),
        ({}, None),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, None),
        ({"pooling_mode_mean_tokens": True}, "my.package.Swish"),
    ],
)
def test_what_is_not_known_is_refused(tmp_path: Path, pooling: dict[str, Any], dense: str | None) -> None:
    with pytest.raises(ModelError):
        read_modules(write_folder(tmp_path, pooling, dense))


def test_prompts_come_from_the_models_own_files(tmp_path: Path) -> None:
    prompts = {"query": "query: ", "passage": "passage: "}
    config = {"prompts": prompts, "default_prompt_name": "passage"}
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config))
    assert read_prompts(ModelFiles("tiny", tmp_path)) == Prompts(prompts, "passage")


def test_a_prompt_comes_before_every_text() -> None:
    tokenizer = Tokenizer(tokenizers.wordpiece())
    prompts = Prompts({"query": "the fox ", "passage": "the dog "}, "passage")
    front = EmbedFront(tokenizer, 64, tokenizer.size, 8, prompts)

    def read(**options: Any) -> list[int]:
        return front.prepare("embed", Embed(inputs=["over"], **options)).work.ids.tolist()

    assert read() == tokenizer.encode("the dog over")
    assert read(prompt="query") == tokenizer.encode("the fox over")
    with pytest.raises(InvalidRequest) as refusal:
        read(prompt="poem")
    assert refusal.value.param == "prompt_name"
    assert front.prepare("embed", Embed(inputs=[[5, 6]])).work.ids.tolist() == [5, 6]
