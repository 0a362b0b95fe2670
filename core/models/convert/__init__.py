"""Foreign formats become a folder of safetensors, config.json and tokenizer.json, once, in the cache."""

from __future__ import annotations

from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models.cache import build_once, find_entry
from polymux.core.models.convert.converter import Converter
from polymux.core.models.convert.ctranslate2 import WhisperConverter
from polymux.core.models.convert.gguf import GgufConverter
from polymux.core.models.convert.tokenizer import TokenizerConverter
from polymux.core.models.source import Located, Report

CONVERTERS: tuple[Converter, ...] = (GgufConverter(), WhisperConverter(), TokenizerConverter())
"""Tried in this order; the first that accepts converts."""

__all__ = ["CONVERTERS", "Converter", "convert"]


def convert(located: Located, report: Report) -> Path:
    """A folder that polymux can read: `located` itself, or its converted copy. Raises `ModelError`."""
    for converter in CONVERTERS:
        if converter.accepts(located.path):
            identity = f"{converter.name}-{converter.version} {located.identity}"

            def build(folder: Path, converter: Converter = converter) -> None:
                converter.convert(located.path, folder, report)

            return build_once(find_entry("models", identity), build)
    if not located.path.is_dir():
        raise ModelError(f"{located.path.name} is not a format polymux reads: safetensors in a folder, or GGUF")
    return located.path
