"""From settings, plugins and names to a `Service`, ready to be started: the same way for every verb that needs one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polymux.core.config import EngineSettings, Settings
from polymux.core.engine.spec import EngineSpec, ModelSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.errors import ConfigError
from polymux.core.models import Catalogue, resolve
from polymux.core.models.source import Report
from polymux.core.pipeline import Front, Pipeline
from polymux.core.plugins import Plugins
from polymux.core.service import Served, Service
from polymux.core.vocabulary import NamedModel

ENGINE = "main"


def assemble(settings: Settings, plugins: Plugins, names: Sequence[str], report: Report) -> Service:
    """A service over the models called `names` (the default ones when there are none), in one engine process.

    Files are fetched and converted on first use; `report` is told what takes long. Nothing is loaded yet: that is
    `Service.start`. Raises `ModelError` for what cannot be resolved, `ConfigError` when there is nothing to serve.
    """
    models = Catalogue.gather(settings, plugins).choose(names)
    if not models:
        raise ConfigError("there is no model to serve: name one, or install the starters (pip install polymux-starter)")
    halves: list[tuple[NamedModel, Pipeline, Front]] = []
    specs: list[ModelSpec] = []
    for model in models:
        files = resolve(model.reference, sha256=model.sha256, sources=plugins.model_sources(), report=report)
        pipeline = plugins.choose_pipeline(files, model.pipeline)
        options = {**({"dtype": settings.engine.dtype} if settings.engine.dtype else {}), **model.options}
        halves.append((model, pipeline, pipeline.front(files, options)))
        specs.append(
            ModelSpec(
                name=model.name,
                reference=files.reference,
                folder=str(files.folder),
                pipeline=pipeline.name,
                options=options,
            )
        )
    engine = EngineProcess(
        EngineSpec(
            name=ENGINE,
            models=specs,
            device=settings.engine.device,
            plugin_dirs=[str(folder) for folder in settings.plugins.dirs],
            disabled_plugins=list(settings.plugins.disable),
            settings=read_site(settings.engine, models),
        )
    )
    return Service(
        Served(model.name, tuple(pipeline.tasks), front, engine, model.aliases) for model, pipeline, front in halves
    )


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
