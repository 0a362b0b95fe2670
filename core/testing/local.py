"""A service over real fronts and programs in this process: the whole way of a request, without a second process.

service = open_local(plugins, [LocalModel("m", folder)])
async with serving(service): ...
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from polymux.core.compute.device import Device
from polymux.core.engine.load import load_program, open_site
from polymux.core.engine.site import SiteSettings
from polymux.core.engine.spec import ModelSpec
from polymux.core.models import ModelFiles
from polymux.core.plugins import Plugins
from polymux.core.service import Served, Service
from polymux.core.testing.engine import LocalEngine

SMALL = SiteSettings(cache_bytes=1 << 26, superpage=1 << 18)
"""Room for tiny models."""


@dataclass(frozen=True)
class LocalModel:
    """A model folder under a name. `pipeline`: the one that shall serve it; None: the first that accepts it."""

    name: str
    """What requests call it."""
    folder: Path
    """Where it lies."""
    pipeline: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    """As in `[models.NAME]`."""
    aliases: tuple[str, ...] = ()
    """Further names."""


def open_local(plugins: Plugins, models: Iterable[LocalModel], settings: SiteSettings = SMALL) -> Service:
    """Load the models and put a service before them; `start` it, and `stop` it in the end."""
    site = open_site(plugins, Device(), settings)
    programs, halves = {}, []
    for model in models:
        files = ModelFiles(str(model.folder), model.folder)
        pipeline = plugins.choose_pipeline(files, model.pipeline)
        spec = ModelSpec(
            name=model.name,
            reference=files.reference,
            folder=str(files.folder),
            pipeline=pipeline.name,
            options=dict(model.options),
        )
        programs[model.name] = load_program(spec, plugins, site)
        halves.append((model, tuple(pipeline.tasks), pipeline.front(files, model.options)))
    engine = LocalEngine(programs, site)
    return Service(Served(model.name, tasks, front, engine, model.aliases) for model, tasks, front in halves)


@asynccontextmanager
async def serving(service: Service) -> AsyncIterator[Service]:
    """The service from its start until its stop."""
    await service.start()
    try:
        await service.wait_ready()
        yield service
    finally:
        await service.stop()
