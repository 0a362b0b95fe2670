"""Vision-language models and image embedders, registered like a stranger's plugin: torch only on load."""

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


class VisionLanguage(Pipeline):
    """Chats about pictures: Qwen2.5-VL, Qwen3-VL, LLaVA, LLaVA-OneVision, Idefics3, SmolVLM."""

    name = "vision-language"
    tasks = ("chat", "complete", "embed", "tokenize", "detokenize")

    def accepts(self, files: ModelFiles) -> bool:
        from polymux.modalities.vision.processor import SEEING

        config = files.config()
        return config.get("model_type") in SEEING and isinstance(config.get("vision_config"), dict)

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.vision.front import LookFront

        return LookFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.vision.program import load_looking

        return load_looking(files, site, options)


class ImageEmbedding(Pipeline):
    """Pictures and texts as vectors of one space: CLIP, SigLIP."""

    name = "image-embedding"
    tasks = ("embed",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.config().get("model_type") in ("clip", "siglip")

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.vision.embedding import ShowFront

        return ShowFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.vision.embedder import load_showing

        return load_showing(files, site, options)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [VisionLanguage(), ImageEmbedding()]


@hookimpl
def examples() -> list[Example]:
    from polymux.modalities.vision.examples import make_examples

    return make_examples()
