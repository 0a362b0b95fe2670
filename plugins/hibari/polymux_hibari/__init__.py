"""A voice as a plugin: a source that finds it, a pipeline that speaks with it. Cheap to import, as every plugin is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux import hookimpl
from polymux.core.models import ModelSource
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1

KIND = "hibari"
"""The `model_type` of the folders that `HibariSource` makes."""


class Speech(Pipeline):
    """English voices of the package hibari-tts, 24 kHz."""

    name = "hibari-speech"
    tasks = ("speak",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.config().get("model_type") == KIND

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux_hibari.front import SpeechFront

        return SpeechFront.load(files)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux_hibari.program import load_speech

        return load_speech(files, site)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [Speech()]


@hookimpl
def model_sources() -> list[ModelSource]:
    from polymux_hibari.source import HibariSource

    return [HibariSource()]


@hookimpl
def examples() -> list[Example]:
    from polymux_hibari.example import make_example

    return [make_example()]
