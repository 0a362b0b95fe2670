"""Weights that are read before the libraries are there that want them are the same as those read by transformers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from polymux.core.compute import weights
from polymux.core.compute.load import load_decoder
from polymux.core.compute.weights import Reading, find_files, read_ahead

CPU = torch.device("cpu")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    config = Qwen3Config(**sizes, **heads, max_position_embeddings=64, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path, max_shard_size="5KB")
    return tmp_path


@pytest.mark.parametrize("piece", [1 << 20, 100], ids=["whole", "in pieces"])
def test_every_weight_is_what_the_file_says(folder: Path, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "PIECE", piece)
    files = find_files(folder)
    assert len(files) > 1
    found = Reading(files, CPU).take()
    wanted = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    assert found.keys() == wanted.keys() - {"lm_head.weight"}
    assert all(torch.equal(found[name], wanted[name]) for name in found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_decoder_of_what_was_read_ahead_is_the_same(folder: Path, dtype: torch.dtype) -> None:
    ahead = load_decoder(folder, CPU, dtype, tier="reference", reading=Reading(find_files(folder), CPU))
    plain = load_decoder(folder, CPU, dtype, tier="reference")
    one, other = (dict(decoder.model.named_parameters()) for decoder in (ahead, plain))  # type: ignore[attr-defined]
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) and one[name].dtype == dtype for name in one)


def test_tensors_of_all_shapes_are_read(tmp_path: Path) -> None:
    kinds = {"scalar": torch.tensor(3.5), "none": torch.zeros(0, 4), "flags": torch.tensor([True, False, True])}
    save_file(kinds, tmp_path / "model.safetensors")
    found = Reading([tmp_path / "model.safetensors"], CPU).take()
    assert all(torch.equal(found[name], kinds[name]) and found[name].dtype == kinds[name].dtype for name in kinds)


def test_what_is_not_for_us_is_left_to_transformers(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_ahead(folder, CPU) is None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {}}))
    assert find_files(folder) == []
    assert find_files(folder / "elsewhere") == []


@pytest.mark.parametrize("content", ["", "{", "[]", "{}", '{"weight_map": 3}', "\udcff"])
def test_a_broken_index_is_for_transformers_to_explain(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content, errors="surrogateescape")
    assert read_ahead(folder, torch.device("cuda")) is None


@pytest.mark.parametrize("left", [0, 4, 40, -100], ids=["nothing", "no header", "half a header", "too little"])
def test_a_broken_file_is_refused(folder: Path, left: int) -> None:
    file = find_files(folder)[0]
    file.write_bytes(file.read_bytes()[: left or None] if left else b"")
    with pytest.raises(ValueError, match="weights"):
        Reading([file], CPU).take()


def test_a_configuration_knows_its_class(folder: Path) -> None:
    """`Reading` is of use for every architecture that transformers has one class for."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    assert MODEL_FOR_CAUSAL_LM_MAPPING.get(type(AutoConfig.from_pretrained(folder)), None) is Qwen3ForCausalLM
