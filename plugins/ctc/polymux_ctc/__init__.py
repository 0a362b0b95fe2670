"""CTC recognisers as a plugin: a task with its own route, and the task `transcribe`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example
from polymux.core.vocabulary import Task

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1

ARCHITECTURES = {"Wav2Vec2ForCTC", "HubertForCTC", "WavLMForCTC", "UniSpeechForCTC"}


class Ctc(Pipeline):
    """Recognisers that read sound and spell letters."""

    name = "ctc"
    tasks = ("words", "transcribe")

    def accepts(self, files: ModelFiles) -> bool:
        return bool(ARCHITECTURES & set(files.config().get("architectures") or ())) and files.has("vocab.json")

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux_ctc.front import CtcFront

        return CtcFront.load(files)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux_ctc.program import load_ctc

        return load_ctc(files, site)


@hookimpl
def tasks() -> list[Task]:
    from polymux_ctc.work import WORDS

    return [WORDS]


@hookimpl
def pipelines() -> list[Pipeline]:
    return [Ctc()]


@hookimpl
def examples() -> list[Example]:
    from polymux_ctc.example import make_example

    return [make_example()]
