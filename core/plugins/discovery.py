"""Where plugins are found: core's own, installed entry points of the group `polymux`, files and folders."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import tomllib
from collections.abc import Iterable
from functools import partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType

from polymux.core.errors import ConfigError, PluginError
from polymux.core.plugins.plugin import Plugin
from polymux.core.plugins.registry import BUILT_IN as ORIGIN
from polymux.core.plugins.registry import GROUP, Plugins
from polymux.core.plugins.watch import PATIENCE

BUILT_IN = {"core": "polymux.core.plugin"}


def load_plugins(
    folders: Iterable[Path] = (),
    disable: Iterable[str] = (),
    *,
    enable: Iterable[str] = (),
    patience: float = PATIENCE,
) -> Plugins:
    """Find and register every plugin: core's own, installed ones, then those under `folders`.

    A project under `folders` takes the place of the installed plugin of its name. `disable` leaves some out; with
    `enable`, all but those and core's own are left out. Raises `ConfigError` for a folder that is not there or for a
    name that no plugin has; a fault inside a plugin raises nothing (see `Plugin.fault`).
    """
    beside = [plugin for folder in folders for plugin in find_in_folder(Path(folder))]
    projects = {plugin.name for plugin in beside if (Path(plugin.origin) / "pyproject.toml").exists()}
    found = [
        *(Plugin(name, ORIGIN, partial(importlib.import_module, module)) for name, module in BUILT_IN.items()),
        *(plugin for plugin in find_installed() if plugin.name not in projects),
        *beside,
    ]
    unwanted, wanted = set(disable), set(enable)
    refuse_unknown(unwanted, found, "disable")
    refuse_unknown(wanted, found, "enable")
    plugins = Plugins(patience=patience)
    for plugin in found:
        if plugin.name in unwanted:
            plugin.status, plugin.reason = "disabled", "left out by plugins.disable or --disable-plugin"
        elif wanted and plugin.name not in wanted and plugin.origin != ORIGIN:
            plugin.status, plugin.reason = "disabled", "not among plugins.enable"
        plugins.register(plugin)
    return plugins


def refuse_unknown(names: set[str], found: Iterable[Plugin], setting: str) -> None:
    """Raise `ConfigError` for a name that no plugin has."""
    known = {plugin.name for plugin in found}
    if unknown := sorted(names - known):
        raise ConfigError(
            f"cannot {setting} unknown plugin {', '.join(unknown)}; found: {', '.join(sorted(known))}",
            param=f"plugins.{setting}",
        )


def find_installed() -> list[Plugin]:
    """The entry points of the group `polymux`, polymux's own first, then by name."""

    def rank(point: EntryPoint) -> tuple[bool, str]:
        return (point.dist is None or point.dist.name != "polymux", point.name)

    plugins = []
    for point in sorted(entry_points(group=GROUP), key=rank):
        origin = f"{point.dist.name} {point.dist.version}" if point.dist else point.value
        plugins.append(Plugin(point.name, origin, point.load))
    return plugins


def find_in_folder(folder: Path) -> list[Plugin]:
    """Plugins at a path: a single file, a package, a project, or all of these in a folder.

    A project (a pyproject.toml with entry points of the group `polymux`) is found without being installed.
    """
    if not folder.exists():
        raise ConfigError(f"plugin folder {folder} does not exist", param="plugins.dirs")
    if folder.is_file() or (folder / "__init__.py").exists():
        return [describe_file(folder)]
    if (folder / "pyproject.toml").exists():
        return find_in_project(folder)
    found = []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(("_", ".")):
            continue
        if (path.is_file() and path.suffix == ".py") or (path / "__init__.py").exists():
            found.append(describe_file(path))
        elif (path / "pyproject.toml").exists():
            found += find_in_project(path)
    return found


def find_in_project(project: Path) -> list[Plugin]:
    """The entry points that a project's pyproject.toml declares; none when it is not valid TOML."""
    try:
        tables = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    points = tables.get("project", {}).get("entry-points", {}).get(GROUP, {})
    return [Plugin(name, str(project), partial(import_from, project, module)) for name, module in points.items()]


def import_from(project: Path, module: str) -> ModuleType:
    """Import a module of a project that need not be installed. Its folder comes last, and shadows nothing."""
    home = str((project / "src" if (project / "src").is_dir() else project).absolute())
    if home not in sys.path:
        sys.path.append(home)
    return importlib.import_module(module)


def describe_file(path: Path) -> Plugin:
    return Plugin(path.stem, str(path), lambda: import_file(path))


def import_file(path: Path) -> ModuleType:
    """Import a file or package under a name of its own, so that `json.py` in a plugin folder shadows nothing."""
    package = path / "__init__.py" if path.is_dir() else path
    name = f"polymux_plugin_{path.stem}"
    spec = importlib.util.spec_from_file_location(
        name, package, submodule_search_locations=[str(path)] if path.is_dir() else None
    )
    if spec is None or spec.loader is None:
        raise PluginError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
