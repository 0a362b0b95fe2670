"""Speech recognition, registered like a stranger's plugin: cheap to import, torch only on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux.core.hooks import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1


class Transcription(Pipeline):
    """Whisper models of every size, with one language or many."""

    name = "transcription"
    tasks = ("transcribe", "translate", "listen")

    def accepts(self, files: ModelFiles) -> bool:
        config = files.config()
        names = config.get("architectures") or ()
        return config.get("model_type") == "whisper" and "WhisperForConditionalGeneration" in names

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.asr.front import TranscribeFront

        return TranscribeFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.asr.program import load_transcription

        return load_transcription(files, site, options)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [Transcription()]


@hookimpl
def examples() -> list[Example]:
    from polymux.modalities.asr.examples import make_examples

    return make_examples()
