"""Pictures and clips, registered like a stranger's plugin: cheap to import, torch only on load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux.core.hooks import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example
from polymux.modalities.diffusion.recipes import find_recipe

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1


class Painting(Pipeline):
    """Pictures: the kinds of diffusers folders that `recipes` lists, save those that make clips."""

    name = "painting"
    tasks: tuple[str, ...] = ("image",)
    films = False

    def accepts(self, files: ModelFiles) -> bool:
        find = find_recipe(files)
        return find is not None and (find(files).frames is not None) == self.films

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux.modalities.diffusion.front import PaintFront

        return PaintFront.load(files, options)

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux.modalities.diffusion.program import load_painter

        return load_painter(files, site, options)


class Filming(Painting):
    """Clips, of a text or of a text and a picture."""

    name = "filming"
    tasks = ("video",)
    films = True


@hookimpl
def pipelines() -> list[Pipeline]:
    return [Painting(), Filming()]


@hookimpl
def commands(app: Any) -> None:
    from polymux.modalities.diffusion.command import calibrate
    from polymux.modalities.diffusion.paint import paint

    app.command("calibrate")(calibrate)
    app.command("paint")(paint)


@hookimpl
def examples() -> list[Example]:
    from polymux.modalities.diffusion.examples import make_examples

    return make_examples()
