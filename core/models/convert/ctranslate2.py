"""Whisper in CTranslate2's binary layout -> safetensors, config.json and generation_config.json for transformers.

The file: u32 version, name of the spec, u32 revision, u32 count; then `count` variables, each a name, u8 rank, u32
dimensions, u8 type, u32 bytes and the data; then u32 count of aliases (name, name of the variable behind it). A name
is u16 length and that many bytes, the last one zero. Only numpy is needed.
"""

from __future__ import annotations

import json
import re
import shutil
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from polymux.core.errors import ModelError
from polymux.core.models.convert.converter import Converter
from polymux.core.models.files import read_json
from polymux.core.models.source import Report

VERSION = 6
SPEC = "WhisperSpec"
TYPES = {0: np.float32, 1: np.int8, 2: np.int16, 3: np.int32, 4: np.float16}
"""The layout's numbers for element types; the others are quantised or have no numpy type."""

ATTENTION = {"self_attention": "self_attn", "attention": "encoder_attn"}
LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")

Tensors = dict[str, np.ndarray]


class WhisperConverter(Converter):
    name = "ctranslate2-whisper"
    version = 1

    def accepts(self, path: Path) -> bool:
        weights = path / "model.bin"
        if not weights.is_file() or not (path / "tokenizer.json").is_file():
            return False
        with weights.open("rb") as file:
            return file.read(6 + len(SPEC)) == struct.pack("<IH", VERSION, len(SPEC) + 1) + SPEC.encode()

    def convert(self, path: Path, folder: Path, report: Report) -> None:
        from safetensors.numpy import save_file

        report(f"converting {path.parent.name} to safetensors, once")
        try:
            variables = read_variables(path / "model.bin")
            tensors = rename_tensors(variables)
            config = describe_model(variables)
        except (KeyError, ValueError, struct.error) as error:
            raise ModelError(f"{path / 'model.bin'} is no Whisper model in CTranslate2's layout: {error!r}") from error
        tokens = {entry["content"]: entry["id"] for entry in read_json(path / "tokenizer.json")["added_tokens"]}
        config |= {
            "eos_token_id": tokens["<|endoftext|>"],
            "bos_token_id": tokens["<|endoftext|>"],
            "pad_token_id": tokens["<|endoftext|>"],
            "decoder_start_token_id": tokens["<|startoftranscript|>"],
        }
        generation = describe_generation(read_json(path / "config.json"), config, tokens)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
        (folder / "generation_config.json").write_text(json.dumps(generation, indent=2))
        shutil.copy(path / "tokenizer.json", folder)


def read_variables(path: Path) -> Tensors:
    """Every variable by name. Raises `ValueError` for a layout or an element type that is not known."""
    with path.open("rb") as file:
        if _read(file, "I") != VERSION or _read_name(file) != SPEC:
            raise ValueError("another version or another kind of model")
        _read(file, "I")
        return dict(_read_variable(file) for _ in range(_read(file, "I")))


def rename_tensors(variables: Tensors) -> Tensors:
    """The variables under transformers' names; stacked projections are cut apart."""
    tensors: Tensors = {"model.decoder.embed_tokens.weight": variables["decoder/embeddings/weight"]}
    for side in ("encoder", "decoder"):
        tensors[f"model.{side}.embed_positions.weight"] = variables[f"{side}/position_encodings/encodings"]
        tensors |= _norm(variables, f"{side}/layer_norm", f"model.{side}.layer_norm")
        for layer in range(count_layers(variables, side)):
            tensors |= _layer(variables, f"{side}/layer_{layer}", f"model.{side}.layers.{layer}")
    for conv in ("conv1", "conv2"):
        tensors |= {f"model.encoder.{conv}.{part}": variables[f"encoder/{conv}/{part}"] for part in ("weight", "bias")}
    return {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}


def describe_model(variables: Tensors) -> dict[str, Any]:
    """config.json, from the variables' shapes."""
    vocabulary, width = variables["decoder/embeddings/weight"].shape
    config: dict[str, Any] = {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "is_encoder_decoder": True,
        "vocab_size": vocabulary,
        "d_model": width,
        "num_mel_bins": variables["encoder/conv1/weight"].shape[1],
        "max_source_positions": len(variables["encoder/position_encodings/encodings"]),
        "max_target_positions": len(variables["decoder/position_encodings/encodings"]),
    }
    for side in ("encoder", "decoder"):
        config[f"{side}_layers"] = count_layers(variables, side)
        config[f"{side}_attention_heads"] = int(variables[f"{side}/num_heads"])
        config[f"{side}_ffn_dim"] = len(variables[f"{side}/layer_0/ffn/linear_0/weight"])
    config["num_hidden_layers"] = config["encoder_layers"]
    return config


def describe_generation(published: dict[str, Any], config: dict[str, Any], tokens: dict[str, int]) -> dict[str, Any]:
    """generation_config.json, from CTranslate2's own config.json and the tokenizer's special tokens."""
    languages = {token: id for token, id in tokens.items() if LANGUAGE.fullmatch(token)}
    multilingual = config["vocab_size"] > 51864
    generation = {
        "eos_token_id": config["eos_token_id"],
        "bos_token_id": config["bos_token_id"],
        "pad_token_id": config["pad_token_id"],
        "decoder_start_token_id": config["decoder_start_token_id"],
        "is_multilingual": multilingual,
        "max_length": config["max_target_positions"],
        "max_initial_timestamp_index": 50,
        "no_timestamps_token_id": tokens["<|notimestamps|>"],
        "prev_sot_token_id": tokens["<|startofprev|>"],
        "suppress_tokens": published.get("suppress_ids", []),
        "begin_suppress_tokens": published.get("suppress_ids_begin", []),
        "alignment_heads": published.get("alignment_heads", []),
    }
    if multilingual:
        generation["lang_to_id"] = languages
        generation["task_to_id"] = {task: tokens[f"<|{task}|>"] for task in ("transcribe", "translate")}
    return generation


def count_layers(variables: Tensors, side: str) -> int:
    layers = {name.split("/")[1] for name in variables if name.startswith(f"{side}/layer_")}
    return len(layers - {"layer_norm"})


def _layer(variables: Tensors, source: str, target: str) -> Tensors:
    tensors: Tensors = {}
    for kind, name in ATTENTION.items():
        if f"{source}/{kind}/linear_0/weight" in variables:
            tensors |= _attention(variables, f"{source}/{kind}", f"{target}.{name}")
            tensors |= _norm(variables, f"{source}/{kind}/layer_norm", f"{target}.{name}_layer_norm")
    tensors |= _norm(variables, f"{source}/ffn/layer_norm", f"{target}.final_layer_norm")
    for place in (0, 1):
        tensors |= _linear(variables, f"{source}/ffn/linear_{place}", [f"{target}.fc{place + 1}"])
    return tensors


def _attention(variables: Tensors, source: str, target: str) -> Tensors:
    """Self-attention stacks queries, keys and values; cross-attention stacks keys and values. Keys have no bias."""
    cross = f"{source}/linear_2/weight" in variables
    stacks = [["q_proj"], ["k_proj", "v_proj"]] if cross else [["q_proj", "k_proj", "v_proj"]]
    tensors: Tensors = {}
    for place, names in enumerate([*stacks, ["out_proj"]]):
        tensors |= _linear(variables, f"{source}/linear_{place}", [f"{target}.{name}" for name in names])
    return {name: tensor for name, tensor in tensors.items() if not name.endswith("k_proj.bias")}


def _linear(variables: Tensors, source: str, targets: list[str]) -> Tensors:
    weights = np.split(variables[f"{source}/weight"], len(targets))
    biases = np.split(variables[f"{source}/bias"], len(targets))
    return {f"{target}.weight": weight for target, weight in zip(targets, weights)} | {
        f"{target}.bias": bias for target, bias in zip(targets, biases)
    }


def _norm(variables: Tensors, source: str, target: str) -> Tensors:
    return {f"{target}.weight": variables[f"{source}/gamma"], f"{target}.bias": variables[f"{source}/beta"]}


def _read_variable(file: BinaryIO) -> tuple[str, np.ndarray]:
    name = _read_name(file)
    shape = [_read(file, "I") for _ in range(_read(file, "B"))]
    kind, size = _read(file, "B"), _read(file, "I")
    if kind not in TYPES or name.endswith("weight_scale"):
        raise ValueError(f"{name} is quantised or of an unknown type ({kind}): use the float16 or float32 model")
    return name, np.frombuffer(file.read(size), TYPES[kind]).reshape(shape)


def _read_name(file: BinaryIO) -> str:
    return file.read(_read(file, "H"))[:-1].decode()


def _read(file: BinaryIO, kind: str) -> int:
    return struct.unpack(f"<{kind}", file.read(struct.calcsize(kind)))[0]
