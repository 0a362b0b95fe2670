"""How an embedder was published: the list of modules that sentence-transformers writes, read without loading any."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.errors import ModelError

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

POOLINGS = {
    "cls": "cls",
    "max": "max",
    "mean": "mean",
    "mean_sqrt_len": "mean_sqrt_len",
    "weightedmean": "weightedmean",
    "lasttoken": "last",
}
"""Names in sentence-transformers' files, and what they are called here."""

ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")
"""What may follow a dense layer, by the name of torch's class."""


@dataclass(frozen=True)
class Dense:
    """A layer over pooled vectors. `folder` holds its weights."""

    folder: str
    inputs: int
    outputs: int
    bias: bool
    activation: str


@dataclass(frozen=True)
class Modules:
    """What follows the transformer. `poolings` are concatenated; `normalize`: the vectors have unit length."""

    poolings: tuple[str, ...] = ("mean",)
    dense: tuple[Dense, ...] = ()
    normalize: bool = False

    def width(self, hidden: int) -> int:
        """Dimensions of a vector, from those of a hidden state."""
        return self.dense[-1].outputs if self.dense else hidden * len(self.poolings)


@dataclass(frozen=True)
class Prompts:
    """What the model wants before a text, by the text's purpose."""

    texts: Mapping[str, str]
    default: str | None = None


def read_modules(files: ModelFiles) -> Modules:
    """From modules.json; without one, the mean. Raises `ModelError` for a module that is not known here."""
    if not files.has("modules.json"):
        return Modules(poolings=_read_pooling(files, "1_Pooling"))
    entries = _read_list(files)
    poolings: tuple[str, ...] = ("mean",)
    dense: list[Dense] = []
    normalize = False
    for entry in entries:
        kind = str(entry.get("type")).rpartition(".")[2]
        if kind == "Pooling":
            poolings = _read_pooling(files, str(entry.get("path")))
        elif kind == "Dense":
            dense.append(_read_dense(files, str(entry.get("path"))))
        elif kind == "Normalize":
            normalize = True
        elif kind not in ("Transformer", "Dropout"):
            raise ModelError(f"{files.reference} needs a module {kind}: not supported")
    return Modules(poolings, tuple(dense), normalize)


def read_prompts(files: ModelFiles) -> Prompts:
    config = files.json("config_sentence_transformers.json")
    texts = config.get("prompts") or {}
    default = config.get("default_prompt_name")
    return Prompts(dict(texts), default if default in texts else None)


def _read_list(files: ModelFiles) -> list[dict[str, Any]]:
    try:
        return msgspec.json.decode(files.path("modules.json").read_bytes(), type=list[dict[str, Any]])
    except msgspec.MsgspecError as error:
        raise ModelError(f"{files.reference}: modules.json cannot be read: {error}") from error


def _read_pooling(files: ModelFiles, folder: str) -> tuple[str, ...]:
    name = f"{folder}/config.json"
    if not files.has(name):
        return ("mean",)
    config = files.json(name)
    if config.get("include_prompt") is False:
        raise ModelError(f"{files.reference} pools without its prompt: not supported")
    named = config.get("pooling_mode")
    if named is not None:
        chosen = [named] if isinstance(named, str) else list(named)
    else:
        chosen = [_strip(key) for key, value in config.items() if key.startswith("pooling_mode_") and value is True]
    if not chosen or any(each not in POOLINGS for each in chosen):
        raise ModelError(f"{files.reference} pools by {', '.join(chosen) or 'nothing'}: not supported")
    return tuple(POOLINGS[each] for each in sorted(chosen, key=list(POOLINGS).index))


def _strip(key: str) -> str:
    """pooling_mode_mean_sqrt_len_tokens -> mean_sqrt_len."""
    return key.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")


def _read_dense(files: ModelFiles, folder: str) -> Dense:
    config = files.json(f"{folder}/config.json")
    activation = str(config.get("activation_function", "Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise ModelError(f"{files.reference}: {activation} after a dense layer is not supported")
    if not files.has(f"{folder}/model.safetensors"):
        raise ModelError(f"{files.reference}: {folder} has no model.safetensors")
    return Dense(folder, config["in_features"], config["out_features"], bool(config.get("bias", True)), activation)
