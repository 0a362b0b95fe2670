"""Speech synthesis, registered like a stranger's plugin: cheap to import, torch only on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux.core.errors import ModelError
from polymux.core.hooks import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

CSM_VOICES = 10
"""Speakers are numbers in CSM's prompts; options may name other voices."""

POLYMUX_API_LEVEL = 1


class VitsSpeech(Pipeline):
    """VITS models of transformers: MMS in more than a thousand languages, one speaker or many."""

    name = "vits-speech"
    tasks = ("speak",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.config().get("model_type") == "vits"

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.tts.front import VitsFront

        return VitsFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.tts.vits_program import load_vits

        return load_vits(files, site, options)


class CsmSpeech(Pipeline):
    """CSM: a backbone, a depth decoder and the codec Mimi."""

    name = "csm-speech"
    tasks = ("speak",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.config().get("model_type") == "csm"

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.core.text.tokenizer import Tokenizer
        from polymux.modalities.tts.front import Around, PromptFront

        config = files.config()
        voices = list(options.get("voices") or map(str, range(CSM_VOICES)))
        codec = config.get("codec_config") or {}
        return PromptFront(
            Tokenizer.load(files),
            voices,
            codec.get("sampling_rate", 24_000),
            "[{voice}]{text}",
            offset=config.get("vocab_size", 2051),
            around=Around(special=True),
        )

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.tts.codec_load import load_csm

        return load_csm(files, site, options)


class FlatSpeech(Pipeline):
    """Plain language models that write the ids of a codec, as Orpheus does; `codec_load` says what describes them."""

    name = "codec-speech"
    tasks = ("speak",)

    def accepts(self, files: ModelFiles) -> bool:
        return isinstance(files.config().get("speech"), dict)

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.core.text.tokenizer import Tokenizer
        from polymux.modalities.tts.front import Around, PromptFront

        speech = files.config()["speech"]
        codec = files.json(f"{speech.get('codec')}/config.json")
        if not codec:
            raise ModelError(f"{files.reference}: config.json names no folder of a codec under speech")
        return PromptFront(
            Tokenizer.load(files),
            list(speech.get("voices") or ["default"]),
            codec.get("sampling_rate", 24_000),
            speech.get("template", "{text}"),
            offset=0,
            around=Around(special=False, before=speech.get("before", []), after=speech.get("after", [])),
        )

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.tts.codec_load import load_flat

        return load_flat(files, site, options)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [VitsSpeech(), CsmSpeech(), FlatSpeech()]


@hookimpl
def examples() -> list[Example]:
    from polymux.modalities.tts.examples import make_examples

    return make_examples()
