"""`hibari:heart,emma`: voices by name as one model, whose first voice is the default.

The package carries one voice and fetches the others from its authors' hub on first use, checked by hash. Either way
the result is a folder like any model's: config.json, vocab.json, one ONNX file for each voice.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from polymux.core.errors import ModelError
from polymux.core.models import ModelSource
from polymux.core.models.cache import build_once, find_entry, hash_file
from polymux.core.models.source import Located, Report
from polymux_hibari import KIND


class HibariSource(ModelSource):
    scheme = KIND

    def resolve(self, name: str, *, sha256: str | None, report: Report) -> Located:
        """`sha256` is that of a single voice's file."""
        registry = read_registry()
        voices = read_names(name, registry)
        if sha256 is not None and len(voices) > 1:
            raise ModelError(f"hibari:{name}: one sha256 cannot cover {len(voices)} voices")

        def build(folder: Path) -> None:
            for voice in voices:
                file = fetch_voice(voice, report)
                expected, found = sha256 or registry[voice]["sha256"], hash_file(file)
                if found != expected:
                    raise ModelError(f"hibari:{voice}: the voice's sha256 is {found}, expected {expected}")
                shutil.copyfile(file, folder / registry[voice]["file"])
            shutil.copyfile(assets() / "vocab.json", folder / "vocab.json")
            described = {voice: {key: registry[voice][key] for key in ("file", "british")} for voice in voices}
            (folder / "config.json").write_text(json.dumps({"model_type": KIND, "voices": described}))

        identity = identify(voices, sha256)
        return Located(build_once(find_entry("models", identity), build), identity)

    def is_fetched(self, name: str, *, sha256: str | None) -> bool:
        try:
            return find_entry("models", identify(read_names(name, read_registry()), sha256)).exists()
        except ModelError:
            return False


def read_names(name: str, registry: dict[str, dict[str, Any]]) -> list[str]:
    """The voices that a reference names, in its order. Raises `ModelError` for one that does not exist."""
    voices = list(dict.fromkeys(name.split(",")))
    for voice in voices:
        if voice not in registry:
            raise ModelError(f"hibari has no voice {voice!r}; there are: {', '.join(registry)}")
    return voices


def read_registry() -> dict[str, dict[str, Any]]:
    """Voice -> its file's name and sha256, and whether it is British."""
    registry: dict[str, dict[str, Any]] = json.loads((assets() / "voices.json").read_bytes())
    return registry


def fetch_voice(voice: str, report: Report) -> Path:
    from hibari.voices import voice_path

    try:
        return Path(voice_path(voice, download_missing=False))
    except FileNotFoundError:
        report(f"downloading the voice {voice}")
    try:
        return Path(voice_path(voice))
    except RuntimeError as error:
        raise ModelError(str(error)) from error


def assets() -> Path:
    """Where the package keeps its files; found without importing it."""
    from importlib.util import find_spec

    spec = find_spec("hibari")
    if spec is None or spec.origin is None:
        raise ModelError("the package hibari-tts is not installed: pip install polymux-hibari")
    return Path(spec.origin).parent / "assets"


def identify(voices: list[str], sha256: str | None) -> str:
    from importlib.metadata import version

    return f"hibari-{version('hibari-tts')} {','.join(voices)} {sha256 or ''}".strip()
