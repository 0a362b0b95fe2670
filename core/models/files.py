"""The local files of one model, and the check that loading them runs no code of a stranger."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from polymux.core.errors import ModelError

PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder. `reference` is what the user asked for, kept for messages."""

    reference: str
    """As the user wrote it, for messages."""
    folder: Path
    """Where the files lie."""

    def config(self) -> dict[str, Any]:
        """`config.json`; empty when there is none. Raises `ModelError` when it is not a JSON object."""
        return self._config

    def json(self, name: str) -> dict[str, Any]:
        """The JSON object in the file `name`; empty when there is no such file. Raises `ModelError` when it is none."""
        return read_json(self.folder / name) if self.has(name) else {}

    def path(self, name: str) -> Path:
        """The file or folder `name`. Raises `ModelError` when the model has no such file."""
        path = self.folder / name
        if not path.exists():
            raise ModelError(f"{self.reference} has no {name} (looked in {self.folder})")
        return path

    def has(self, name: str) -> bool:
        """Whether there is a file or folder of that name."""
        return (self.folder / name).exists()

    def weights(self) -> list[Path]:
        """The safetensors files that make up the model: what the index lists, else the one, else all of them.

        Raises `ModelError` when there are none, or when the index lists a file that is missing.
        """
        for index in sorted(self.folder.glob("*.safetensors.index.json")):
            shards = sorted(set(read_json(index).get("weight_map", {}).values()))
            return [self.path(shard) for shard in shards]
        found = sorted(self.folder.glob("*.safetensors"))
        if not found:
            raise ModelError(f"{self.reference} has no safetensors weights (looked in {self.folder})")
        whole = [path for path in found if path.name in ("model.safetensors", "diffusion_pytorch_model.safetensors")]
        return whole or found

    @cached_property
    def _config(self) -> dict[str, Any]:
        return self.json("config.json")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises `ModelError` naming the file when it is none."""
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def refuse_code(files: ModelFiles) -> None:
    """Raise `ModelError` when the model could only be loaded by unpickling or by running code from its folder."""
    own = sorted(path for path in files.folder.rglob("*") if path.is_file())
    pickled = [path.name for path in own if path.suffix in PICKLED]
    if pickled and not any(path.suffix in (".safetensors", ".onnx") for path in own):
        raise ModelError(
            f"{files.reference} has only pickled weights ({', '.join(pickled[:3])}); unpickling runs code, so polymux "
            "reads safetensors only. Use a safetensors revision of the model"
        )
    for name in ("config.json", "model_index.json"):
        if not files.has(name):
            continue
        config = read_json(files.folder / name)
        kind = config.get("model_type")
        for key, value in walk(config):
            if key == "auto_map" and not is_native(str(kind)):
                raise ModelError(
                    f"{files.reference} needs code from its own repository (auto_map in {name}, model_type {kind!r}); "
                    "polymux runs no remote code. A plugin can bring the architecture instead"
                )
            if key.startswith("_attn_implementation") and isinstance(value, str) and "/" in value:
                raise ModelError(f"{files.reference} asks for a kernel from a repository ({key}: {value!r}); refused")


def walk(value: Any) -> Iterator[tuple[str, Any]]:
    """Every key with its value, at any depth: a nested part's config can ask for code as well."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield key, inner
            yield from walk(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from walk(inner)


@cache
def is_native(model_type: str) -> bool:
    """Whether transformers itself has this architecture, so that `auto_map` can be left unread.

    Asked in another process: transformers imports torch, which this one shall not.
    """
    code = (
        "import sys\n"
        "from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES\n"
        "print(sys.argv[1] in CONFIG_MAPPING_NAMES)"
    )
    done = subprocess.run([sys.executable, "-c", code, model_type], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelError(f"transformers cannot be imported: {lines[-1]}. `polymux doctor` says what to do")
    return done.stdout.strip() == "True"
