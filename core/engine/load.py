"""From a spec to a running engine: plugins, the site, and the program of every model."""

from __future__ import annotations

import logging
import threading
from dataclasses import fields
from pathlib import Path
from typing import Any

from polymux.core.compute.device import Device, open_device, touch_libraries
from polymux.core.engine.defaults import choose_settings
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.spec import EngineSpec, ModelSpec
from polymux.core.errors import ConfigError, ModelError, PolymuxError
from polymux.core.imports import importing
from polymux.core.models import ModelFiles
from polymux.core.pipeline import Program
from polymux.core.plugins import Plugins, load_plugins
from polymux.core.stopwatch import begun, now, part, stopwatch
from polymux.core.vocabulary import Ready

QUIET = 0.2
"""Seconds without work after which an engine prepares later launches: a request that comes after a short pause does not
wait for that."""

STATED = ("quantization", "deterministic")
"""Options of a model that its facts repeat: what a user gets is said where the model is listed."""

log = logging.getLogger("polymux.engine")


def load(spec: EngineSpec) -> tuple[Loop, Ready]:
    """The loop over every model of `spec`, and what is told of it: each model's facts with the seconds it took to load.

    Raises `ModelError`, naming the model, or `ConfigError`.
    """
    own, imported = begun(), now()
    began = own if spec.began is None else spec.began
    with importing():  # plugins bring libraries of their own
        plugins = load_plugins([Path(folder) for folder in spec.plugin_dirs], spec.disabled_plugins)
        device = open_device(spec.device)
        settings = choose_settings(device.torch, [Path(model.folder) for model in spec.models], spec.settings)
        site = open_site(plugins, device, read_settings(settings))
    if device.torch.type == "cuda":
        threading.Thread(target=touch_libraries, args=(device.torch,), name="libraries", daemon=True).start()
    opened = now()
    shared = {"process": own - began, "imports": imported - own, "plugins and device": opened - imported}
    programs: dict[str, Program] = {}
    facts: dict[str, dict[str, Any]] = {}
    for model in spec.models:
        loading = now()
        if facts:
            shared["other models"] = loading - opened
        try:
            with stopwatch() as parts:
                programs[model.name] = load_program(model, plugins, site)
        except ModelError as error:
            if not model.optional or len(spec.models) == 1:
                raise
            log.error("left out: %s", error.message)
            facts[model.name] = {"error": error.message}
            continue
        facts[model.name] = {
            **programs[model.name].describe(),
            **{name: model.options[name] for name in STATED if name in model.options},
            "load_seconds": round(now() - loading, 3),
            "start_seconds": {**{name: round(seconds, 3) for name, seconds in shared.items()}, **parts},
        }
    return Loop(site, programs, QUIET), Ready(facts, plugins.complain())


def open_site(plugins: Plugins, device: Device, settings: SiteSettings) -> Site:
    """The device with everything that plugins bring for it."""
    return Site(
        device,
        settings,
        tuple(plugins.attention_backends()),
        tuple(plugins.quantizers()),
        tuple(plugins.drafters()),
        tuple(plugins.step_caches()),
    )


def load_program(model: ModelSpec, plugins: Plugins, site: Site) -> Program:
    """The model's program, warm. Raises `ModelError` with its name."""
    files = ModelFiles(model.reference, Path(model.folder))
    pipeline = plugins.choose_pipeline(files, model.pipeline)
    try:
        with part("other"):
            program = pipeline.load(files, site, model.options)
            for stage in program.stages:
                stage.warm()
        return program
    except PolymuxError as error:
        raise ModelError(f"model {model.name}: {error.message}") from error
    except Exception as error:
        log.error("model %s: pipeline %s failed", model.name, pipeline.name, exc_info=error)
        fault = plugins.tell("pipelines", pipeline, error, f"{pipeline.name}.load")
        raise ModelError(f"model {model.name}: cannot load {model.reference}: {fault}") from error


def read_settings(settings: dict[str, Any]) -> SiteSettings:
    """The site's settings out of plain data; what is not given keeps its default."""
    known = {field.name for field in fields(SiteSettings)}
    unknown = sorted(settings.keys() - known)
    if unknown:
        raise ConfigError(f"an engine has no setting {', '.join(unknown)}; there are: {', '.join(sorted(known))}")
    return SiteSettings(**settings)
