"""Registering and calling plugins, so that a broken one is disabled with its reason and the rest work.

pluggy alone aborts a whole hook call when one implementation raises, and aborts loading at the first entry point
that cannot be imported. Here each plugin is imported, registered and called on its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pluggy

from polymux.core import hooks
from polymux.core.errors import ModelError, PluginError
from polymux.core.models import ModelFiles, ModelSource
from polymux.core.pipeline import Pipeline
from polymux.core.plugins.plugin import Fault, Plugin, locate
from polymux.core.vocabulary import API_LEVEL, NamedModel, Task

if TYPE_CHECKING:
    from polymux.core.compute.attention import AttentionBackend

GROUP = "polymux"
OLDEST_API_LEVEL = 1
HOOKS = tuple(sorted(name for name, value in vars(hooks).items() if hasattr(value, f"{GROUP}_spec")))

KINDS: dict[str, tuple[type, str]] = {
    "tasks": (Task, "name"),
    "pipelines": (Pipeline, "name"),
    "named_models": (NamedModel, "name"),
    "model_sources": (ModelSource, "scheme"),
}
"""Hook -> what its list must hold, and the attribute that must be unique over all plugins."""


@dataclass
class Plugins:
    """Every plugin that was found, and the hooks of those that work. Build one with `load_plugins`."""

    records: list[Plugin] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hooks)
        self._answers: dict[str, list[tuple[Plugin, list[Any]]]] = {}

    def tasks(self) -> list[Task]:
        return self._collect("tasks")

    def pipelines(self) -> list[Pipeline]:
        return self._collect("pipelines")

    def named_models(self) -> list[NamedModel]:
        return self._collect("named_models")

    def model_sources(self) -> list[ModelSource]:
        return self._collect("model_sources")

    def attention_backends(self) -> list[AttentionBackend]:
        """In the order in which they are to be tried: a plugin's before core's own. Imports torch."""
        return self._collect("attention_backends")[::-1]

    def routes(self) -> list[Any]:
        return self._collect("routes")

    def middleware(self) -> list[Any]:
        return self._collect("middleware")

    def add_commands(self, app: Any) -> None:
        """Let every plugin add its verbs to the typer application `app`."""
        for plugin in self._implementers("commands"):
            self._call(plugin, "commands", app=app)

    def choose_pipeline(self, files: ModelFiles, name: str | None = None) -> Pipeline:
        """The pipeline called `name`, or the first that accepts `files`.

        Raises `ModelError` when there is none. A pipeline whose `accepts` raises costs its plugin, not the choice.
        """
        known = self.pipelines()
        if name is not None:
            for pipeline in known:
                if pipeline.name == name:
                    return pipeline
            names = ", ".join(sorted(pipeline.name for pipeline in known)) or "none"
            raise ModelError(f"no pipeline is called {name!r}; there are: {names}. `polymux plugins` lists them")
        for plugin, pipelines in list(self._answers["pipelines"]):
            pipeline: Pipeline
            for pipeline in pipelines:
                try:
                    if plugin.status == "enabled" and pipeline.accepts(files):
                        return pipeline
                except ModelError:
                    raise
                except Exception as error:
                    self._fail(plugin, f"pipelines: {pipeline.name}.accepts", error)
        kind = files.config().get("model_type") or files.config().get("architectures") or "no model_type"
        names = ", ".join(sorted(pipeline.name for pipeline in known)) or "none"
        raise ModelError(
            f"no pipeline accepts {files.reference} ({kind}). Pipelines: {names}. "
            "Install a plugin that serves this kind of model; `polymux plugins` shows whether one is disabled"
        )

    def register(self, plugin: Plugin) -> None:
        """Import one plugin and register its hooks; a fault disables it and is kept in its record."""
        self.records.append(plugin)
        if plugin.status != "enabled":
            return
        first = next((other for other in self.records if other.name == plugin.name), plugin)
        if first is not plugin:
            message = f"the name {plugin.name!r} is already taken by {first.origin}"
            self._fail(plugin, "name", PluginError(message), "Rename one of the two, or uninstall it")
            return
        try:
            plugin.module = plugin.load()
        except ImportError as error:
            self._fail(
                plugin, "import", error, f"Install what it imports, or leave it out: --disable-plugin {plugin.name}"
            )
            return
        except (Exception, SystemExit) as error:
            self._fail(plugin, "import", error)
            return
        try:
            plugin.api_level = read_api_level(plugin.module)
            self._manager.register(plugin.module, name=plugin.name)
            plugin.hooks = self._read_hooks(plugin)
        except PluginError as error:
            self._fail(plugin, "contract", error, "Upgrade the plugin or polymux so that both speak one level")
        except (pluggy.PluginValidationError, ValueError) as error:
            self._fail(plugin, "signature", error, f"Compare it with {hooks.__name__}")

    def describe(self) -> list[dict[str, Any]]:
        """Name, origin, status, API level, hooks and reason of every plugin, for `plugins` and its route."""
        return [plugin.describe() for plugin in self.records]

    def _read_hooks(self, plugin: Plugin) -> tuple[str, ...]:
        names = []
        for caller in self._manager.get_hookcallers(plugin.module) or ():
            if not caller.has_spec():
                near = get_close_matches(caller.name, HOOKS, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else f"; the hooks are {', '.join(HOOKS)}"
                raise PluginError(f"there is no hook {caller.name!r}{hint}")
            if any(impl.plugin is plugin.module and impl.wrapper for impl in caller.get_hookimpls()):
                raise PluginError(f"hook {caller.name!r} is a wrapper; polymux calls plugins one by one")
            names.append(caller.name)
        return tuple(sorted(names))

    def _implementers(self, hook: str) -> Iterator[Plugin]:
        return (plugin for plugin in self.records if plugin.status == "enabled" and hook in plugin.hooks)

    def _collect(self, hook: str) -> list[Any]:
        """The lists of every plugin, joined. Each implementation is called once in the life of this object."""
        if hook not in self._answers:
            answers = self._answers[hook] = []
            for plugin in list(self._implementers(hook)):
                values = self._call(plugin, hook)
                if plugin.status == "enabled" and self._check(plugin, hook, values):
                    answers.append((plugin, list(values)))
        return [value for plugin, values in self._answers[hook] if plugin.status == "enabled" for value in values]

    def _call(self, plugin: Plugin, hook: str, **arguments: Any) -> Any:
        others = [other.module for other in self.records if other.module and other.module is not plugin.module]
        try:
            answers = self._manager.subset_hook_caller(hook, others)(**arguments)
        except (Exception, SystemExit) as error:
            self._fail(plugin, hook, error)
            return None
        return answers[0] if answers else None

    def _check(self, plugin: Plugin, hook: str, values: Any) -> bool:
        try:
            check_answer(hook, values, taken={key: other for key, other in self._keys(hook)})
        except PluginError as error:
            self._fail(plugin, hook, error)
            return False
        return True

    def _keys(self, hook: str) -> Iterator[tuple[str, str]]:
        if hook in KINDS:
            for plugin, values in self._answers[hook]:
                for value in values:
                    yield getattr(value, KINDS[hook][1]), plugin.name

    def _fail(self, plugin: Plugin, hook: str, error: BaseException, advice: str | None = None) -> None:
        plugin.status = "failed"
        plugin.fault = Fault(
            hook=f"plugin {plugin.name!r}, {hook}",
            message=str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}",
            where=locate(error, plugin),
            advice=advice or f"Fix it, or leave it out: --disable-plugin {plugin.name}",
        )
        if plugin.module is not None and self._manager.is_registered(plugin.module):
            self._manager.unregister(plugin.module)


def read_api_level(module: ModuleType) -> int:
    """The level that a plugin states as `POLYMUX_API_LEVEL`; the oldest one when it states none."""
    level = getattr(module, "POLYMUX_API_LEVEL", OLDEST_API_LEVEL)
    if not isinstance(level, int):
        raise PluginError(f"POLYMUX_API_LEVEL is {level!r}, not a whole number")
    if not OLDEST_API_LEVEL <= level <= API_LEVEL:
        raise PluginError(f"it speaks API level {level}; this polymux speaks {OLDEST_API_LEVEL} to {API_LEVEL}")
    return level


def check_answer(hook: str, values: Any, taken: dict[str, str]) -> None:
    """Raise `PluginError` unless `values` is a list of what the hook asks for, under names not yet `taken`."""
    if not isinstance(values, Sequence) or isinstance(values, str):
        raise PluginError(f"it returned {type(values).__name__}, not a list")
    if hook == "attention_backends":
        from polymux.core.compute.attention import AttentionBackend  # only engines ask, and they have torch

        kind, key = AttentionBackend, "name"
    elif hook in KINDS:
        kind, key = KINDS[hook]
    else:
        return
    seen = dict(taken)
    for value in values:
        if not isinstance(value, kind):
            raise PluginError(f"it returned a {type(value).__name__} where a {kind.__name__} belongs")
        name = getattr(value, key, None)
        if not isinstance(name, str) or not name:
            raise PluginError(f"a {kind.__name__} has no {key}")
        if name in seen:
            raise PluginError(f"{key} {name!r} is already registered by plugin {seen[name]!r}")
        seen[name] = "itself"
