"""LoRA files of image and video models, in every layout that diffusers reads: its own, PEFT's, and trainers' own.

diffusers renames what trainers write; what is left are pairs of matrices by the name of the layer they belong to.
"""

from __future__ import annotations

import inspect
import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import diffusers
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from polymux.core.compute.adapters import AdapterFiles
from polymux.core.compute.adapters.files import CONFIG, KEY, Pair, digest_files
from polymux.core.errors import ModelError

USUAL = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
"""Files of a folder that hold several, by which comes first."""

METADATA = "lora_adapter_metadata"
"""In a file's header: PEFT's settings, by part."""

REFUSED = ("dora_scale", "lora_magnitude_vector", ".diff", ".diff_b", "hada_w", "lokr_w", ".lora_B.bias")
"""Marks of what changes more than the product of two matrices."""

SPELLING = re.compile(
    r"(?P<layer>.+?)[._]lora(?:_linear_layer)?[._](?P<half>A|B|down|up)(?:\.(?!weight)[^.]+)?\.weight(?:\.alpha)?"
)
"""All ways in which a matrix is called after its layer."""

OLD_NAMES = {"to_q": "q_proj", "to_k": "k_proj", "to_v": "v_proj", "to_out": "out_proj"}
"""What a text encoder's layers were called once."""


@dataclass(frozen=True)
class Target:
    """The model that an adapter is for."""

    pipeline: str
    """diffusers' class."""
    layers: frozenset[str]
    """Names of all layers that may be changed, from their part on: `unet.mid_block…`."""
    unet: Any = None
    """The configuration of its UNet, if it has one: trainers number its blocks in their own way."""


@dataclass(frozen=True)
class LoraFiles(AdapterFiles):
    """An adapter that diffusers must rename first."""

    target: Target

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        tensors = _rename(self.name, self.path, self.target)[0]
        return {
            layer: (tensors[pair.down].flatten(1), tensors[pair.up].flatten(1) * pair.scale)
            for layer, pair in self.pairs.items()
        }


def open_lora(name: str, folder: Path, target: Target) -> AdapterFiles:
    """The adapter in a folder. Raises `ModelError` for what is no LoRA adapter, or one of an unsupported kind."""
    if (folder / CONFIG).is_file():
        files = AdapterFiles.open(name, folder)
        return replace(files, pairs={_place(layer, target.layers): pair for layer, pair in files.pairs.items()})
    path = _find(name, folder)
    tensors, alphas = _rename(name, path, target)
    return LoraFiles(name, path, _pair(name, tensors, alphas), digest_files(path), target)


def _find(name: str, folder: Path) -> Path:
    files = sorted(folder.glob("*.safetensors"))
    for usual in USUAL:
        if folder / usual in files:
            return folder / usual
    if len(files) != 1:
        raise ModelError(
            f"adapter {name}: {folder} holds {len(files)} safetensors files, not one, and none is called "
            + " or ".join(USUAL)
        )
    return files[0]


def _place(layer: str, layers: frozenset[str]) -> str:
    """The layer's name in the model. A file that does not say which part it is for is for the denoiser."""
    parts = {known.split(".")[0] for known in layers}
    part, _, rest = layer.partition(".")
    if part not in parts:
        part, rest = "unet" if "unet" in parts else "transformer", layer
    rest = rest.replace(".processor.", ".")
    if part.startswith("text_encoder"):
        front, _, last = rest.rpartition(".")
        rest = f"{front}.{OLD_NAMES.get(last, last)}"
        if f"{part}.{rest}" not in layers:  # libraries differ in whether this level is there
            rest = rest.removeprefix("text_model.") if rest.startswith("text_model.") else f"text_model.{rest}"
    elif rest.endswith(".to_out"):
        rest += ".0"
    return f"{part}.{rest}"


def _spell(key: str, layers: frozenset[str]) -> str:
    """A matrix's name as PEFT's: `part.layer.lora_A.weight`. What is no matrix keeps its name."""
    match = SPELLING.fullmatch(key)
    if match is None:
        return key
    half = {"down": "A", "up": "B"}.get(match["half"], match["half"])
    return f"{_place(match['layer'], layers)}.lora_{half}.weight"


def _rename(name: str, path: Path, target: Target) -> tuple[dict[str, Tensor], dict[str, float]]:
    """The file's matrices, and alphas by layer."""
    try:
        given: dict[str, Any] = load_file(path)
        with safe_open(path, framework="pt") as file:
            settings = json.loads((file.metadata() or {}).get(METADATA, "{}"))
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(f"adapter {name}: {path.name} cannot be read: {error}") from error
    for key in given:
        if any(mark in key for mark in REFUSED):
            raise ModelError(f"adapter {name}: {path.name} holds {key}: only plain LoRA is supported")
    if not given:
        raise ModelError(f"adapter {name}: {path.name} is empty")
    layers = target.layers
    given, beside = _convert(name, path, given, target)
    told = {**beside, **{key: value for key, value in given.items() if key.endswith(".alpha")}}
    tensors = {_spell(key, layers): tensor for key, tensor in given.items() if not key.endswith(".alpha")}
    alphas = _read_settings(name, settings, tensors)
    for key, value in told.items():
        plain = key.removesuffix(".alpha")
        spelled = _spell(plain if plain.endswith(".weight") else f"{plain}.lora.down.weight", layers)
        alphas[spelled.removesuffix(".lora_A.weight")] = float(value)
    return tensors, alphas


def _convert(name: str, path: Path, given: dict[str, Any], target: Target) -> tuple[dict[str, Any], dict[str, Any]]:
    """A trainer's layout as diffusers', and the alphas that it tells apart."""
    convert = getattr(getattr(diffusers, target.pipeline), "lora_state_dict", None)
    if convert is None:
        return given, {}
    options: dict[str, Any] = {"unet_config": target.unet} if target.unet is not None else {}
    if "return_alphas" in inspect.signature(convert).parameters:
        options["return_alphas"] = True
    try:
        answer = convert(dict(given), **options)
    except Exception as error:  # a file of another model meets whatever its renaming stumbles over
        raise ModelError(f"adapter {name}: {path.name} is of no layout for a {target.pipeline}: {error}") from error
    given, alphas = answer if isinstance(answer, tuple) else (answer, {})
    return given, alphas or {}


def _read_settings(name: str, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """By layer, what its product counts for times its rank, where PEFT's settings say so."""
    alphas: dict[str, float] = {}
    for key, tensor in tensors.items():
        layer = key.removesuffix(".lora_A.weight")
        part = layer.split(".")[0]
        if settings.get(f"{part}.use_dora"):
            raise ModelError(f"adapter {name}: use_dora is not supported")
        alpha = settings.get(f"{part}.lora_alpha")
        for pattern, own in (settings.get(f"{part}.alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", layer):
                alpha = own
        if alpha is not None and layer != key:
            alphas[layer] = alpha * math.sqrt(tensor.shape[0]) if settings.get(f"{part}.use_rslora") else alpha
    return alphas


def _pair(name: str, tensors: Mapping[str, Tensor], alphas: Mapping[str, float]) -> dict[str, Pair]:
    halves: dict[str, dict[str, str]] = {}
    for key in tensors:
        match = KEY.fullmatch(key)
        if match is None:
            raise ModelError(f"adapter {name}: {key} belongs to no layer")
        halves.setdefault(match["module"], {})[match["half"]] = key
    pairs: dict[str, Pair] = {}
    for module, keys in sorted(halves.items()):
        if keys.keys() != {"A", "B"}:
            raise ModelError(f"adapter {name}: {module} has one of its two matrices only")
        down, up = tensors[keys["A"]], tensors[keys["B"]]
        rank = down.shape[0] if down.dim() else 0
        if not rank or down.dim() not in (2, 4) or prod(up.shape[1:]) != rank:
            raise ModelError(
                f"adapter {name}: the matrices of {module} are {list(down.shape)} and {list(up.shape)}, no pair"
            )
        scale = alphas.get(module, rank) / rank
        if not math.isfinite(scale):
            raise ModelError(f"adapter {name}: the alpha of {module} is not a number")
        pairs[module] = Pair(keys["A"], keys["B"], prod(down.shape[1:]), up.shape[0], rank, scale)
    if not pairs:
        raise ModelError(f"adapter {name}: it is empty")
    return pairs
