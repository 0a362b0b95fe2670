"""From settings, plugins and names to a `Service`, ready to be started: the same way for every verb that needs one."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from polymux.core.config import EngineSettings, Settings
from polymux.core.engine.child import Child
from polymux.core.engine.spec import EngineSpec, ModelSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.errors import ConfigError, ModelError, PolymuxError
from polymux.core.models import Catalogue, ModelFiles, resolve
from polymux.core.models.resolve import find_source
from polymux.core.models.source import Report
from polymux.core.pipeline import Front, Pipeline
from polymux.core.plugins import Plugins
from polymux.core.service import Served, Service
from polymux.core.vocabulary import NamedModel

ENGINE = "main"

ADAPTERS = "adapters"
"""The option of a model that names what may change its weights: name -> reference, later name -> folder."""


@dataclass(frozen=True)
class Halves:
    """A model that was found: its front, and what an engine is told to load."""

    model: NamedModel
    pipeline: Pipeline
    front: Front
    spec: ModelSpec

    def serve(self, engine: EngineProcess) -> Served:
        return Served(self.model.name, tuple(self.pipeline.tasks), self.front, engine, self.model.aliases)


def assemble(
    settings: Settings, plugins: Plugins, names: Sequence[str], report: Report, child: Child | None = None
) -> Service:
    """A service over the models called `names` (the default ones when there are none), in one engine process: `child`
    if one was begun already.

    Files are fetched and converted on first use; `report` is told what takes long. Nothing is loaded yet: that is
    `Service.start`. Raises `ModelError` for what cannot be resolved, `ConfigError` when there is nothing to serve.
    """
    halves = gather_halves(settings, plugins, names, report)
    engine = EngineProcess(make_spec(ENGINE, settings, plugins, halves), first=child)
    return Service(half.serve(engine) for half in halves)


def gather_halves(settings: Settings, plugins: Plugins, names: Sequence[str], report: Report) -> list[Halves]:
    """The models to serve, with their fronts.

    A default model, which a plugin brings and nobody asked for by name, is left out when it cannot be had, and
    `report` is told why; unless none is left.
    """
    models = Catalogue.gather(settings, plugins).choose(names)
    if not models:
        raise ConfigError("there is no model to serve: name one, or install the starters (pip install polymux-starter)")
    configured = {model.name for model in settings.models}
    found: list[Halves] = []
    failure: ModelError | None = None
    for model in models:
        optional = not names and model.name not in configured
        try:
            found.append(open_half(settings, plugins, model, report, optional=optional))
        except ModelError as error:
            if not optional:
                raise
            failure = error
            report(f"left out: {error.message}")
    if failure is not None and not found:
        raise failure
    return found


def open_half(settings: Settings, plugins: Plugins, model: NamedModel, report: Report, *, optional: bool) -> Halves:
    """Raises `ModelError`. What else a plugin's source or front raises disables the plugin, and is told as one."""
    files = locate(plugins, model, report)
    pipeline = plugins.choose_pipeline(files, model.pipeline)
    options = {**({"dtype": settings.engine.dtype} if settings.engine.dtype else {}), **model.options}
    if ADAPTERS in options:
        options[ADAPTERS] = locate_adapters(model.name, options[ADAPTERS], plugins, report)
    try:
        front = pipeline.front(files, {**options, "call_formats": plugins.call_formats()})
    except PolymuxError:
        raise
    except Exception as error:
        plugin = plugins.blame("pipelines", pipeline, error, f"{pipeline.name}.front")
        raise ModelError(f"model {model.name}: {plugin.fault if plugin else error}") from error
    spec = ModelSpec(
        name=model.name,
        reference=files.reference,
        folder=str(files.folder),
        pipeline=pipeline.name,
        options=options,
        optional=optional,
    )
    return Halves(model, pipeline, front, spec)


def locate(plugins: Plugins, model: NamedModel, report: Report) -> ModelFiles:
    sources = plugins.model_sources()
    try:
        return resolve(model.reference, sha256=model.sha256, sources=sources, report=report)
    except PolymuxError:
        raise
    except Exception as error:
        source, _ = find_source(model.reference, sources)
        plugin = plugins.blame("model_sources", source, error, f"{source.scheme}:")
        raise ModelError(f"model {model.name}: {plugin.fault if plugin else error}") from error


def make_spec(name: str, settings: Settings, plugins: Plugins, halves: Sequence[Halves]) -> EngineSpec:
    """What an engine process over these models is told."""
    return EngineSpec(
        name=name,
        models=[half.spec for half in halves],
        device=settings.engine.device,
        plugin_dirs=[str(folder) for folder in settings.plugins.dirs],
        disabled_plugins=plugins.left_out(),
        settings=read_site(settings.engine, [half.model for half in halves]),
    )


def locate_adapters(model: str, references: Any, plugins: Plugins, report: Report) -> dict[str, str]:
    """Each adapter's folder. Raises `ModelError` for one that cannot be resolved, `ConfigError` for a bad name."""
    if not isinstance(references, Mapping):
        raise ConfigError(f"model {model}: {ADAPTERS} is a table of names and references", param=ADAPTERS)
    folders = {}
    for name, reference in references.items():
        if not re.fullmatch(r"[\w.-]+", name) or not isinstance(reference, str):
            raise ConfigError(f"model {model}: adapter {name!r} is no name with a reference", param=ADAPTERS)
        folders[name] = str(resolve(reference, sources=plugins.model_sources(), report=report).folder)
    return folders


def read_site(engine: EngineSettings, models: Sequence[NamedModel]) -> dict[str, Any]:
    """What the engine's site is told: only what was set. One model that asks for determinism gets it for all."""
    asked = any(model.options.get("deterministic") for model in models) or None
    values = {
        "deterministic": asked if engine.deterministic is None else engine.deterministic,
        "cache_bytes": engine.cache_bytes and int(engine.cache_bytes),
        "max_rows": engine.max_rows,
        "max_units": engine.max_units,
    }
    return {name: value for name, value in values.items() if value is not None}
