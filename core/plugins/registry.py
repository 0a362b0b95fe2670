"""Registering and calling plugins, so that a broken one is disabled with its reason and the rest work.

pluggy alone aborts a whole hook call when one implementation raises, and aborts loading at the first entry point
that cannot be imported. Here each plugin is imported, registered and called on its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pluggy

from polymux.core import hooks
from polymux.core.errors import ModelError, PluginError
from polymux.core.models import ModelFiles, ModelSource
from polymux.core.pipeline import Pipeline
from polymux.core.plugins.example import Example
from polymux.core.plugins.kinds import check_answer, read_api_level, read_kind
from polymux.core.plugins.plugin import Fault, Plugin, describe_fault
from polymux.core.plugins.watch import PATIENCE, call_watched
from polymux.core.vocabulary import Complaint, NamedModel, Task

if TYPE_CHECKING:
    from polymux.core.batch.drafting import Drafting
    from polymux.core.cache.rules import StepCaching
    from polymux.core.compute.attention import AttentionBackend
    from polymux.core.compute.quantization import Quantizer
    from polymux.core.text.calls import CallFormat

GROUP = "polymux"
BUILT_IN = "built-in"
"""The origin of what core itself brings."""
HOOKS = tuple(sorted(name for name, value in vars(hooks).items() if hasattr(value, f"{GROUP}_spec")))


@dataclass
class Plugins:
    """Every plugin that was found, and the hooks of those that work. Build one with `load_plugins`."""

    records: list[Plugin] = field(default_factory=list)
    """Every plugin that was found, working or not."""
    patience: float = PATIENCE
    """Seconds that an import or a hook may take."""

    def __post_init__(self) -> None:
        self._manager = pluggy.PluginManager(GROUP)
        self._manager.add_hookspecs(hooks)
        self._answers: dict[str, list[tuple[Plugin, list[Any]]]] = {}
        self._shown: dict[str, list[Example]] = {}

    def tasks(self) -> list[Task]:
        """Every task, the built-in ones first."""
        return self._collect("tasks")

    def pipelines(self) -> list[Pipeline]:
        """Every pipeline, in the order in which they are asked whether they accept a model."""
        return self._collect("pipelines")

    def named_models(self) -> list[NamedModel]:
        """Every model that a plugin gave a name."""
        return self._collect("named_models")

    def model_sources(self) -> list[ModelSource]:
        """Every source, core's own first."""
        return self._collect("model_sources")

    def attention_backends(self) -> list[AttentionBackend]:
        """In the order in which they are to be tried: a plugin's before core's own. Imports torch."""
        return self._collect("attention_backends")[::-1]

    def quantizers(self) -> list[Quantizer]:
        """Imports torch."""
        return self._collect("quantizers")

    def drafters(self) -> list[Drafting]:
        """Imports torch."""
        return self._collect("drafters")

    def call_formats(self) -> list[CallFormat]:
        """Formats in which models write tool calls."""
        return self._collect("call_formats")

    def step_caches(self) -> list[StepCaching]:
        """Every step cache that plugins bring beside core's own."""
        return self._collect("step_caches")

    def examples(self, name: str) -> list[Example]:
        """Those of the plugin of that name; no other is asked for its own. May import torch."""
        if name not in self._shown:
            plugin = self.find(name)
            values = self._call(plugin, "examples") if plugin in self._implementers("examples") else []
            good = plugin.status == "enabled" and self._check(plugin, "examples", values)
            self._shown[name] = list(values) if good else []
        return self._shown[name]

    def checks(self) -> list[Path]:
        """Every file of checks."""
        return self._collect("checks")

    def routes(self) -> list[Any]:
        """Every route, unchecked: `answers` tells whose they are."""
        return self._collect("routes")

    def middleware(self) -> list[Any]:
        """Every middleware entry, unchecked."""
        return self._collect("middleware")

    def add_commands(self, app: Any) -> None:
        """Let every plugin add its verbs to the typer application `app`. One that fails adds none."""
        for plugin in list(self._implementers("commands")):
            before = len(app.registered_commands), len(app.registered_groups)
            taken = {command.name for command in app.registered_commands}
            self._call(plugin, "commands", app=app)
            twice = sorted(taken & {command.name for command in app.registered_commands[before[0] :]})
            if twice:
                self._fail(plugin, "commands", PluginError(f"the verb {twice[0]!r} is taken; choose another name"))
            if plugin.status != "enabled":
                del app.registered_commands[before[0] :], app.registered_groups[before[1] :]

    def find(self, name: str) -> Plugin:
        """The plugin of that name. Raises `PluginError`, listing those that were found."""
        for plugin in self.records:
            if plugin.name == name:
                return plugin
        names = ", ".join(plugin.name for plugin in self.records)
        raise PluginError(f"there is no plugin {name!r}; found: {names}")

    def answers(self, hook: str) -> list[tuple[Plugin, list[Any]]]:
        """Who answered a list hook, and what, from the plugins that are enabled now."""
        self._collect(hook)
        return [(plugin, values) for plugin, values in self._answers[hook] if plugin.status == "enabled"]

    def blame(self, hook: str, value: Any, error: BaseException, what: str = "") -> Plugin | None:
        """What a plugin gave for `hook` went wrong in use: it is disabled, and the plugin returned."""
        for plugin, values in self._answers.get(hook, ()):
            if any(own is value for own in values):
                self._fail(plugin, f"{hook}: {what}" if what else hook, error)
                return plugin
        return None

    def tell(self, hook: str, value: Any, error: BaseException, what: str) -> Fault | None:
        """What a plugin gave for `hook` went wrong for one model: its notes say so, and it goes on."""
        for plugin, values in self._answers.get(hook, ()):
            if any(own is value for own in values):
                fault = describe_fault(plugin, f"{hook}: {what}", error)
                plugin.notes.append(str(fault))
                return fault
        return None

    def complain(self) -> dict[str, Complaint]:
        """Every plugin with something to say about it, for a process that shows it to people."""
        return {
            plugin.name: Complaint(str(plugin.fault) if plugin.fault else None, list(plugin.notes))
            for plugin in self.records
            if plugin.fault or plugin.notes
        }

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
        for plugin, pipelines in self.answers("pipelines"):
            for pipeline in pipelines:
                if plugin.status == "enabled" and self._accepts(plugin, pipeline, files):
                    return pipeline
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
        imported = call_watched(plugin.load, self._patience(plugin))
        plugin.record("import", imported.cost)
        if imported.error is not None:
            absent = isinstance(imported.error, ImportError)
            advice = f"Install what it imports, or leave it out: --disable-plugin {plugin.name}" if absent else None
            self._fail(plugin, "import", imported.error, advice)
            return
        plugin.module = imported.value
        try:
            plugin.api_level = read_api_level(plugin.module)
        except PluginError as error:
            self._fail(plugin, "contract", error, "Upgrade the plugin or polymux so that both speak one level")
            return
        try:
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                self._manager.register(plugin.module, name=plugin.name)
            plugin.notes += [str(warning.message) for warning in told]
            plugin.hooks = self._read_hooks(plugin)
        except PluginError as error:
            self._fail(plugin, "contract", error, f"Compare it with {hooks.__name__}")
        except (pluggy.PluginValidationError, ValueError) as error:
            self._fail(plugin, "signature", error, f"Compare it with {hooks.__name__}")

    def left_out(self) -> list[str]:
        """Names that another process, which looks for plugins by itself, need not try."""
        working = {plugin.name for plugin in self.records if plugin.status == "enabled"}
        return sorted({plugin.name for plugin in self.records} - working)

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
        caller = self._manager.subset_hook_caller(hook, others)
        outcome = call_watched(lambda: caller(**arguments), self._patience(plugin, hook))
        plugin.record(hook, outcome.cost)
        if outcome.error is not None:
            self._fail(plugin, hook, outcome.error)
            return None
        return outcome.value[0] if outcome.value else None

    def _patience(self, plugin: Plugin, hook: str = "") -> float | None:
        """Our own hooks may have to import torch, which takes as long as it takes; so may `examples`, for which no
        server waits."""
        return None if plugin.origin == BUILT_IN or hook == "examples" else self.patience

    def _accepts(self, plugin: Plugin, pipeline: Pipeline, files: ModelFiles) -> bool:
        outcome = call_watched(lambda: pipeline.accepts(files), self._patience(plugin))
        if isinstance(outcome.error, ModelError):
            raise outcome.error
        if outcome.error is not None:
            self._fail(plugin, f"pipelines: {pipeline.name}.accepts", outcome.error)
        return bool(outcome.value)

    def _check(self, plugin: Plugin, hook: str, values: Any) -> bool:
        try:
            check_answer(hook, values, taken={key: other for key, other in self._keys(hook)})
        except PluginError as error:
            self._fail(plugin, hook, error)
            return False
        return True

    def _keys(self, hook: str) -> Iterator[tuple[str, str]]:
        key = read_kind(hook)[1]
        for plugin, values in self._answers.get(hook, ()):
            for value in values:
                if key is not None:
                    yield getattr(value, key), plugin.name

    def _fail(self, plugin: Plugin, hook: str, error: BaseException, advice: str | None = None) -> None:
        plugin.status = "failed"
        plugin.fault = describe_fault(plugin, hook, error, advice)
        if plugin.module is not None and self._manager.is_registered(plugin.module):
            self._manager.unregister(plugin.module)
