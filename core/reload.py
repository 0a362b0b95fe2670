"""A development server's models: those of plugin folders have engines of their own, swapped when a file changes.

A change is loaded beside what runs: a fresh registry, fresh fronts, a fresh engine. Once that is ready, new requests go
to it, and the old engine ends after its last answer. A change that does not load leaves everything as it was.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from pathlib import Path

from polymux.core.assembly import ENGINE, Halves, gather_halves, make_spec, open_half
from polymux.core.config import Settings
from polymux.core.engine.client import Engine
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.errors import PolymuxError
from polymux.core.models.source import Report
from polymux.core.plugins import Plugin, Plugins, load_plugins
from polymux.core.service import Service

INTERVAL = 0.3
"""Seconds between two looks at the files."""
DRAIN = 0.05

log = logging.getLogger("polymux.reload")

Stamps = dict[Path, int]


class Reloader:
    """Owns the service of a development server. `plugins` is the registry that works now."""

    def __init__(self, settings: Settings, plugins: Plugins, names: Sequence[str], report: Report) -> None:
        self.settings = settings
        self.plugins = plugins
        self.report = report
        self.halves = gather_halves(settings, plugins, names, report)
        self._numbers = count(1)
        self._engines: dict[str, EngineProcess] = {}
        """By the name of the plugin whose models it runs; the main one's is empty."""
        groups: dict[str, list[Halves]] = {}
        for half in self.halves:
            groups.setdefault(self._home(half), []).append(half)
        served = []
        for name, group in groups.items():
            self._engines[name] = self._open_engine(group, plugins, name)
            served += [half.serve(self._engines[name]) for half in group]
        self.service = Service(served)
        self._stamps = {plugin.name: stamp(plugin) for plugin in self._watched()}
        self._draining: set[asyncio.Task[None]] = set()

    async def watch(self, on_swap: Callable[[Plugins], None]) -> None:
        """Look for changes for ever. `on_swap` is told of the registry that works from now on."""
        while True:
            await asyncio.sleep(INTERVAL)
            changed = self.find_changed()
            if changed:
                await self.reload(changed, on_swap)

    def find_changed(self) -> list[Plugin]:
        """The folder plugins whose files are not what they were when this was last asked."""
        changed = []
        for plugin in self._watched():
            now = stamp(plugin)
            if now != self._stamps.get(plugin.name):
                self._stamps[plugin.name] = now
                changed.append(plugin)
        return changed

    async def reload(self, changed: Sequence[Plugin], on_swap: Callable[[Plugins], None]) -> bool:
        """Swap what these plugins brought; False, with a reason in their notes, when it cannot be loaded."""
        names = [plugin.name for plugin in changed]
        kept = forget_modules(changed)
        fresh: dict[str, EngineProcess] = {}
        try:
            plugins = await asyncio.to_thread(self._load_plugins, names)
            groups = {name: self._open_group(name, plugins) for name in names}
            for name, group in groups.items():
                if group:
                    fresh[name] = self._open_engine(group, plugins, name)
                    await fresh[name].start()
            for engine in fresh.values():
                await engine.wait_ready()
        except PolymuxError as error:
            sys.modules.update(kept)
            for engine in fresh.values():
                await engine.stop()
            for name in names:
                self.plugins.find(name).notes.append(f"the change was not loaded: {error.message}")
            self.report(f"still serving what was there: {error.message}")
            return False
        for name, engine in fresh.items():
            old = self._engines[name]
            self._engines[name] = engine
            self.service.swap(old, [half.serve(engine) for half in groups[name]])
            self._retire(old)
        self.plugins = plugins
        on_swap(plugins)
        self.report(f"reloaded {', '.join(names)}")
        return True

    def _load_plugins(self, names: Iterable[str]) -> Plugins:
        own = self.settings.plugins
        plugins = load_plugins(own.dirs, own.disable, enable=own.enable, patience=own.patience_seconds)
        plugins.pipelines(), plugins.tasks(), plugins.named_models(), plugins.model_sources()
        for name in names:
            record = plugins.find(name)
            if record.fault is not None:
                raise PolymuxError(str(record.fault))
        return plugins

    def _open_group(self, name: str, plugins: Plugins) -> list[Halves]:
        """The models that the plugin serves now, as the fresh registry makes them."""
        group = [half for half in self.halves if self._home(half) == name]
        made = [open_half(self.settings, plugins, half.model, self.report, optional=False) for half in group]
        self.halves = [half for half in self.halves if half not in group] + made
        return made

    def _home(self, half: Halves) -> str:
        """The folder plugin that serves a model; empty for all others."""
        watched = {plugin.name for plugin in self._watched()}
        for plugin, pipelines in self.plugins.answers("pipelines"):
            if plugin.name in watched and any(each.name == half.pipeline.name for each in pipelines):
                return plugin.name
        return ""

    def _watched(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins.records if Path(plugin.origin).exists()]

    def _open_engine(self, group: Sequence[Halves], plugins: Plugins, name: str) -> EngineProcess:
        title = f"{name}-{next(self._numbers)}" if name else ENGINE
        return EngineProcess(make_spec(title, self.settings, plugins, group))

    def _retire(self, engine: Engine) -> None:
        async def drain() -> None:
            while not engine.idle:
                await asyncio.sleep(DRAIN)
            await engine.stop()

        task = asyncio.create_task(drain(), name=f"retire {engine.name}")
        self._draining.add(task)
        task.add_done_callback(self._draining.discard)


def stamp(plugin: Plugin) -> Stamps:
    """When each of the plugin's files was last written."""
    origin = Path(plugin.origin)
    files = [origin] if origin.is_file() else [path for path in origin.rglob("*.py") if "tests" not in path.parts]
    found: Stamps = {}
    for path in files:
        with contextlib.suppress(OSError):
            found[path] = path.stat().st_mtime_ns
    return found


def forget_modules(plugins: Iterable[Plugin]) -> dict[str, object]:
    """Take the plugins' own modules out of `sys.modules`, so that they are imported again; returns them."""
    kept: dict[str, object] = {}
    for plugin in plugins:
        home = Path(plugin.origin).resolve()
        for name, module in list(sys.modules.items()):
            file = getattr(module, "__file__", None)
            if file and Path(file).resolve().is_relative_to(home):
                kept[name] = sys.modules.pop(name)
    return kept
