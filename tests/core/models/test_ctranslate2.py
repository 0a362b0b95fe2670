"""Whisper out of CTranslate2's binary layout: every weight where transformers wants it."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration

from polymux.core.errors import ModelError
from polymux.core.models import resolve
from polymux.core.testing.tiny import build, tiny_whisper

NAMES = ["endoftext", "startoftranscript", "en", "de", "fr", "translate", "transcribe", "startofprev", "nospeech"]
NAMES += ["notimestamps"]
TOKENS = {f"<|{name}|>": 80 + place for place, name in enumerate(NAMES)}


@pytest.fixture(autouse=True)
def home(tmp_path_factory, monkeypatch) -> None:
    """A cache of the test's own."""
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path_factory.mktemp("home")))


def write_variables(path: Path, variables: dict[str, np.ndarray]) -> None:
    """CTranslate2's layout, written from its description."""
    kinds = {np.dtype(np.float32): 0, np.dtype(np.int8): 1, np.dtype(np.int16): 2, np.dtype(np.float16): 4}

    def spell(text: str) -> bytes:
        return struct.pack("<H", len(text) + 1) + text.encode() + b"\0"

    with path.open("wb") as file:
        file.write(struct.pack("<I", 6) + spell("WhisperSpec") + struct.pack("<II", 3, len(variables)))
        for name, value in variables.items():
            shape = struct.pack(f"<B{value.ndim}I", value.ndim, *value.shape)
            file.write(spell(name) + shape + struct.pack("<BI", kinds[value.dtype], value.nbytes) + value.tobytes())
        file.write(struct.pack("<I", 1) + spell("decoder/projection/weight") + spell("decoder/embeddings/weight"))


def flatten(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """A transformers model under CTranslate2's names, projections stacked as there."""
    weights = {name: tensor.half().numpy() for name, tensor in model.state_dict().items()}

    def linear(target: str, *sources: str) -> dict[str, np.ndarray]:
        width = len(weights[f"{sources[0]}.weight"])
        nothing = np.zeros(width, np.float16)
        return {
            f"{target}/weight": np.concatenate([weights[f"{source}.weight"] for source in sources]),
            f"{target}/bias": np.concatenate([weights.get(f"{source}.bias", nothing) for source in sources]),
        }

    def norm(target: str, source: str) -> dict[str, np.ndarray]:
        return {f"{target}/gamma": weights[f"{source}.weight"], f"{target}/beta": weights[f"{source}.bias"]}

    found: dict[str, np.ndarray] = {"decoder/embeddings/weight": weights["model.decoder.embed_tokens.weight"]}
    for side, layers in (("encoder", 2), ("decoder", 3)):
        found[f"{side}/num_heads"] = np.array(4, np.int16)
        found[f"{side}/position_encodings/encodings"] = weights[f"model.{side}.embed_positions.weight"]
        found |= norm(f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(layers):
            ours, theirs = f"{side}/layer_{layer}", f"model.{side}.layers.{layer}"
            own = [f"{theirs}.self_attn.{name}_proj" for name in ("q", "k", "v", "out")]
            found |= linear(f"{ours}/self_attention/linear_0", *own[:3])
            found |= linear(f"{ours}/self_attention/linear_1", own[3])
            found |= norm(f"{ours}/self_attention/layer_norm", f"{theirs}.self_attn_layer_norm")
            if side == "decoder":
                cross = [f"{theirs}.encoder_attn.{name}_proj" for name in ("q", "k", "v", "out")]
                found |= linear(f"{ours}/attention/linear_0", cross[0])
                found |= linear(f"{ours}/attention/linear_1", *cross[1:3])
                found |= linear(f"{ours}/attention/linear_2", cross[3])
                found |= norm(f"{ours}/attention/layer_norm", f"{theirs}.encoder_attn_layer_norm")
            found |= linear(f"{ours}/ffn/linear_0", f"{theirs}.fc1") | linear(f"{ours}/ffn/linear_1", f"{theirs}.fc2")
            found |= norm(f"{ours}/ffn/layer_norm", f"{theirs}.final_layer_norm")
    for conv in ("conv1", "conv2"):
        for part in ("weight", "bias"):
            found[f"encoder/{conv}/{part}"] = weights[f"model.encoder.{conv}.{part}"]
    return found


def write_model(folder: Path, variables: dict[str, np.ndarray]) -> Path:
    write_variables(folder / "model.bin", variables)
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [1, 2], "suppress_ids_begin": [5]}))
    added = [{"content": token, "id": id} for token, id in TOKENS.items()]
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    return folder


def test_every_weight_arrives(tmp_path):
    original = build(tiny_whisper)
    files = resolve(str(write_model(tmp_path, flatten(original))))
    loaded, report = WhisperForConditionalGeneration.from_pretrained(
        files.folder, output_loading_info=True, dtype=torch.float32
    )
    assert not report["missing_keys"] and not report["unexpected_keys"]
    expected = original.state_dict()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, expected[name].half().float()), name


def test_what_generation_needs_is_kept(tmp_path):
    files = resolve(str(write_model(tmp_path, flatten(build(tiny_whisper)))))
    generation = files.json("generation_config.json")
    assert generation["suppress_tokens"] == [1, 2] and generation["begin_suppress_tokens"] == [5]
    assert generation["no_timestamps_token_id"] == TOKENS["<|notimestamps|>"]
    assert files.config()["decoder_start_token_id"] == TOKENS["<|startoftranscript|>"]


def test_quantised_and_cut_files_are_refused(tmp_path):
    variables = flatten(build(tiny_whisper))
    quantised = {**variables, "decoder/embeddings/weight_scale": np.ones(141, np.float32)}
    with pytest.raises(ModelError, match="quantised"):
        resolve(str(write_model(tmp_path, quantised)))
    write_model(tmp_path, variables)
    (tmp_path / "model.bin").write_bytes((tmp_path / "model.bin").read_bytes()[:5000])
    with pytest.raises(ModelError, match="layout"):
        resolve(str(tmp_path))
