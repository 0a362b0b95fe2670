"""Imports go one way: gateway -> core, modalities -> core, plugins -> core's public names (and the testing gateway)."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OUTSIDE = {"core": (), "gateway": ("core",), "modalities": ("core",), "polymux": ("core",)}
"""Folder -> the other folders of the distribution it may import."""

FILES = sorted(path for folder in OUTSIDE for path in (ROOT / folder).rglob("*.py"))
PLUGIN_FILES = sorted((ROOT / "plugins").glob("*/*/**/*.py"))


def read_imports(path: Path) -> Iterator[tuple[int, str, int]]:
    """(line, imported module or name with its module, relative level) of every import at any depth of the file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, 0) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}", node.level) for alias in node.names)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute | ast.Name):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield node.lineno, str(node.args[0].value), 0


def find_wrong(path: Path, own: tuple[str, ...]) -> list[str]:
    """The wrong arrows of one file; `own` is its place, such as ("modalities", "llm", "plugin.py")."""
    wrong = []
    for line, target, level in read_imports(path):
        parts = target.split(".")
        if level:
            wrong.append(f"{path}:{line}: relative import of {target}")
        elif parts[0] in ("core", "gateway", "modalities"):
            wrong.append(f"{path}:{line}: {target} lacks its polymux.")
        elif parts[0] == "polymux" and len(parts) > 1 and parts[1] in OUTSIDE:
            into_sibling = own[0] == "modalities" == parts[1] and len(own) > 2 and parts[2:3] != [own[1]]
            allowed = parts[1] == own[0] or parts[1] in OUTSIDE[own[0]]
            if into_sibling or not allowed:
                wrong.append(f"{path}:{line}: {'/'.join(own)} must not import {target}")
    return wrong


def test_every_folder_is_walked():
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(OUTSIDE)
    assert PLUGIN_FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_arrows_point_to_core(path):
    assert not find_wrong(path, path.relative_to(ROOT).parts)


@pytest.mark.parametrize("path", PLUGIN_FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_plugins_use_public_names_of_core_only(path):
    for line, target, _ in read_imports(path):
        parts = target.split(".")
        if parts[0] == "polymux":
            tested = parts[1:3] == ["gateway", "testing"]  # an in-process gateway is part of the kit
            assert tested or parts[1] not in ("gateway", "modalities"), f"{path}:{line}: {target}"
            assert not any(part.startswith("_") for part in parts), f"{path}:{line}: {target} is private"


@pytest.mark.parametrize(
    ("place", "code"),
    [
        ("core/x.py", "from polymux.gateway import app"),
        ("core/x.py", "def f():\n    import polymux.modalities.llm"),
        ("core/x.py", "import importlib\nimportlib.import_module('polymux.gateway.app')"),
        ("gateway/x.py", "from polymux.modalities.llm import front"),
        ("gateway/x.py", "from polymux import modalities"),
        ("modalities/llm/x.py", "from polymux.modalities.asr import front"),
        ("modalities/llm/x.py", "from polymux.gateway import app"),
        ("modalities/llm/x.py", "from . import front"),
        ("core/x.py", "from core import errors"),
    ],
)
def test_the_walk_sees_a_wrong_arrow(tmp_path, place, code):
    """The test above would pass for ever if the walk saw nothing."""
    path = tmp_path / "x.py"
    path.write_text(code)
    assert find_wrong(path, Path(place).parts)


def test_the_walk_lets_right_arrows_pass(tmp_path):
    path = tmp_path / "x.py"
    path.write_text("import os\nfrom polymux.core import errors\nfrom polymux.modalities.llm import front")
    assert not find_wrong(path, ("modalities", "llm", "x.py"))
