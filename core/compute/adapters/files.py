"""An adapter's folder as PEFT writes it: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from polymux.core.cache.prefix import DIGEST_BYTES
from polymux.core.errors import ModelError
from polymux.core.models.files import read_json

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

KEY = re.compile(r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?P<half>[AB])(?:\.[^.]+)?\.weight")

REFUSED = ("use_dora", "modules_to_save", "layer_replication", "trainable_token_indices", "lora_bias")
"""Settings of PEFT that change more than the product of two matrices."""


@dataclass(frozen=True)
class Pair:
    """The two matrices for one linear layer: `down` is (rank, in), `up` is (out, rank). A convolution's are read as
    matrices too."""

    down: str
    """Their keys in the file."""
    up: str
    inputs: int
    outputs: int
    rank: int
    scale: float
    """What the product counts for."""


@dataclass(frozen=True)
class AdapterFiles:
    """One adapter, checked but not read: its matrices by the name of the linear layer they belong to."""

    name: str
    path: Path
    pairs: dict[str, Pair]
    digest: bytes
    """Names the content: what adapted rows computed is shared only between rows of equal digest."""

    @classmethod
    def open(cls, name: str, folder: Path) -> AdapterFiles:
        """Raises `ModelError` for what is no LoRA adapter, or one of a kind that is not supported."""
        config_path, path = folder / CONFIG, folder / WEIGHTS
        for each in (config_path, path):
            if not each.is_file():
                raise ModelError(f"adapter {name}: there is no {each.name} in {folder}")
        config = read_json(config_path)
        _check(name, config)
        return cls(name, path, _read_pairs(name, path, config), digest_files(config_path, path))

    def read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Per linear layer its two matrices, scaled: their product is what the layer's weight changes by."""
        with safe_open(self.path, framework="pt") as file:
            return {
                module: (file.get_tensor(pair.down).flatten(1), file.get_tensor(pair.up).flatten(1) * pair.scale)
                for module, pair in self.pairs.items()
            }


def _check(name: str, config: dict[str, Any]) -> None:
    kind = config.get("peft_type")
    if kind != "LORA":
        raise ModelError(f"adapter {name}: peft_type is {kind!r}; LORA is supported")
    if config.get("bias", "none") != "none":
        raise ModelError(f"adapter {name}: it changes biases (bias={config['bias']!r}), which is not supported")
    for setting in REFUSED:
        if config.get(setting):
            raise ModelError(f"adapter {name}: {setting} is not supported")


def _read_pairs(name: str, path: Path, config: dict[str, Any]) -> dict[str, Pair]:
    halves: dict[str, dict[str, tuple[str, list[int]]]] = {}
    try:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118 (no mapping)
                match = KEY.fullmatch(key)
                if match is None:
                    raise ModelError(f"adapter {name}: {path.name} holds {key}, which belongs to no linear layer")
                halves.setdefault(match["module"], {})[match["half"]] = key, file.get_slice(key).get_shape()
    except (OSError, SafetensorError) as error:
        raise ModelError(f"adapter {name}: {path.name} cannot be read: {error}") from error
    pairs = {module: _pair(name, module, halves[module], config) for module in sorted(halves)}
    if not pairs:
        raise ModelError(f"adapter {name}: {path.name} is empty")
    return pairs


def _pair(name: str, module: str, halves: dict[str, tuple[str, list[int]]], config: dict[str, Any]) -> Pair:
    if halves.keys() != {"A", "B"}:
        raise ModelError(f"adapter {name}: {module} has one of its two matrices only")
    (down, inner), (up, outer) = halves["A"], halves["B"]
    if len(inner) not in (2, 4) or len(outer) != len(inner) or inner[0] != math.prod(outer[1:]) or not inner[0]:
        raise ModelError(f"adapter {name}: the matrices of {module} are {inner} and {outer}, no pair")
    rank = inner[0]
    alpha = config.get("lora_alpha", rank)
    for pattern, own in (config.get("alpha_pattern") or {}).items():
        if re.fullmatch(rf"(.*\.)?({pattern})", module):
            alpha = own
            break
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise ModelError(f"adapter {name}: lora_alpha is {alpha!r}, not a number")
    scale = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    return Pair(down, up, math.prod(inner[1:]), outer[0], rank, scale)


def digest_files(*paths: Path) -> bytes:
    """Names the content of files."""
    hasher = blake2b(digest_size=DIGEST_BYTES)
    for path in paths:
        with path.open("rb") as file:
            while piece := file.read(1 << 20):
                hasher.update(piece)
    return hasher.digest()
