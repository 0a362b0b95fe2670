"""Names that do not exist: a modality from nothing, with a task, a route, a model source and a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polymux import hookimpl
from polymux.core.models import ModelSource
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.plugins import Example
from polymux.core.vocabulary import NamedModel, Task

if TYPE_CHECKING:
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles

POLYMUX_API_LEVEL = 1


class Names(Pipeline):
    """Invents names from a table of letters."""

    name = "names"
    tasks = ("invent",)

    def accepts(self, files: ModelFiles) -> bool:
        return files.config().get("model_type") == "letter-table"

    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        from polymux_example.front import NamesFront

        return NamesFront(files.config().get("theme", "unknown"))

    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        from polymux_example.program import load_names

        return load_names(files, site)


@hookimpl
def tasks() -> list[Task]:
    from polymux_example.work import INVENT

    return [INVENT]


@hookimpl
def pipelines() -> list[Pipeline]:
    return [Names()]


@hookimpl
def model_sources() -> list[ModelSource]:
    from polymux_example.source import NamesSource

    return [NamesSource()]


@hookimpl
def named_models() -> list[NamedModel]:
    return [NamedModel("example/names", "names:flowers")]


@hookimpl
def examples() -> list[Example]:
    from polymux_example.source import learn
    from polymux_example.work import Invent

    return [
        Example(
            pipeline="names",
            make=lambda folder: learn("stars", folder),
            asks={"invent": [Invent(), Invent(count=5, seed=7, temperature=0.8)]},
            refused={"invent": [Invent(count=0), Invent(temperature=-1.0)]},
        )
    ]
