"""Running the checks on one plugin, in a process of their own."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path

from polymux.core.errors import ConfigError, PluginError
from polymux.core.plugins import Plugin, Plugins, load_plugins
from polymux.core.plugins.discovery import find_in_folder

PLUGIN = "polymux.core.testing.conformance.plugin"


def run_checks(target: str | Path, folders: Iterable[Path] = (), options: Sequence[str] = ()) -> int:
    """Check a plugin, by its name or by where it lies; pytest's exit status, 0 when it owes nothing.

    `options` go to pytest (`-x`, `-k seed`). Raises `PluginError` for a target that is no plugin or does not load,
    `ConfigError` without pytest.
    """
    if find_spec("pytest") is None:
        raise ConfigError("the check needs pytest: pip install pytest")
    name, where = locate_target(target, [Path(folder) for folder in folders])
    plugins = load_plugins(where)
    record = plugins.find(name)
    if record.fault is not None:
        raise PluginError(f"{record.fault}")
    command = [
        *(sys.executable, "-m", "pytest", "-p", PLUGIN, "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(Path(__file__).parent), "--import-mode=importlib", "-q", "--no-header", "-rfE"),
        *("--polymux-plugin", name),
        *(word for folder in where for word in ("--polymux-dir", str(folder))),
        *(str(path) for path in gather_checks(plugins, record)),
        *options,
    ]
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    return subprocess.run(command, env={**quiet, **os.environ, "HF_HUB_OFFLINE": "1"}).returncode


def locate_target(target: str | Path, folders: list[Path]) -> tuple[str, list[Path]]:
    """The plugin's name, and the folders in which it and others are looked for."""
    path = Path(target)
    looks_like_path = isinstance(target, Path) or os.sep in str(target) or path.suffix == ".py"
    if not looks_like_path and not (path / "pyproject.toml").exists():
        return str(target), folders
    found = find_in_folder(path) if path.exists() else []
    if len(found) != 1:
        what = "no plugin" if not found else f"{len(found)} plugins"
        raise PluginError(f"{path} holds {what}: name a file, a package, or a project with an entry point `polymux`")
    return found[0].name, [*folders, path.absolute()]


def gather_checks(plugins: Plugins, record: Plugin) -> list[Path]:
    """The files of every plugin that concern this one.

    A file that says `NEEDS = ("pipelines",)` is for plugins with one of those hooks: torch stays out of the check of
    one that needs none.
    """
    chosen = []
    for path in dict.fromkeys(plugins.checks()):
        needs = read_needs(path)
        if not needs or set(needs) & set(record.hooks):
            chosen.append(path)
    return chosen


def read_needs(path: Path) -> tuple[str, ...]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "NEEDS":
            needs: tuple[str, ...] = ast.literal_eval(node.value)
            return needs
    return ()
