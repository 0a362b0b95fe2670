"""Pictures, registered like a stranger's plugin: cheap to import, torch only on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux.core.hooks import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles


class FluxImages(Pipeline):
    """FLUX models in diffusers' folders, with distilled guidance (dev) or without any (schnell)."""

    name = "flux"
    tasks = ("image",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.json("model_index.json").get("_class_name") == "FluxPipeline"

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.diffusion.front import PaintFront

        return PaintFront.load(files)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.diffusion.program import load_flux

        return load_flux(files, site, options)


@hookimpl
def pipelines() -> list[Pipeline]:
    return [FluxImages()]
