"""`polymux plugin new`: for every kind, a project whose tests and whose check pass before any edit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from polymux.core.errors import ConfigError, PluginError
from polymux.core.plugins.scaffold import list_kinds, write_plugin
from polymux.core.testing.conformance.runner import locate_target, run_checks

KINDS = (
    "attention-backend",
    "command",
    "middleware",
    "model-source",
    "pipeline",
    "quantizer",
    "route",
    "step-cache",
    "voice",
)
ROOT = Path(__file__).parent.parent.parent.parent


def test_there_is_a_template_for_every_kind() -> None:
    assert tuple(list_kinds()) == KINDS


def check_style(folder: Path) -> None:
    ruff = ["--isolated", "--line-length", "120"]
    for verb in (["check", "--select", "E,F,UP,B"], ["format", "--check"]):
        done = subprocess.run([sys.executable, "-m", "ruff", *verb, *ruff, str(folder)], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_works_and_is_in_the_houses_style(kind: str, tmp_path: Path) -> None:
    """A name with a dash, and one that sorts imports before polymux's own."""
    folder = write_plugin(kind, "a-" + kind[:4].strip("-"), tmp_path)
    check_style(folder)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr


@pytest.mark.parametrize(
    ("kind", "name", "says"),
    [
        ("modality", "x", "there is no kind 'modality'; there are: attention-backend"),
        ("route", "My Page", "is no name"),
        ("route", "2nd", "is no name"),
        ("route", "../up", "is no name"),
    ],
)
def test_wrong_kinds_and_names_are_refused(kind: str, name: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=says):
        write_plugin(kind, name, tmp_path)
    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    write_plugin("route", "page", tmp_path)
    with pytest.raises(ConfigError, match="is there already"):
        write_plugin("command", "page", tmp_path)


def test_a_target_is_a_name_a_file_or_a_project(tmp_path: Path) -> None:
    folder = write_plugin("route", "page", tmp_path)
    assert locate_target("llm", []) == ("llm", [])
    assert locate_target(folder, [])[0] == "page"
    single = tmp_path / "single.py"
    single.write_text("")
    assert locate_target(single, []) == ("single", [single])
    with pytest.raises(PluginError, match="holds no plugin"):
        locate_target(tmp_path / "nowhere", [])


def test_the_check_of_what_is_no_plugin_says_so() -> None:
    with pytest.raises(PluginError, match="there is no plugin 'nobody'; found: core"):
        run_checks("nobody")


@pytest.mark.parametrize("kind", KINDS)
def test_long_names_stay_in_the_houses_style(kind: str, tmp_path: Path) -> None:
    """Lines hold the name: a long one breaks none of them."""
    folder = write_plugin(kind, "a-rather-long-name-of-one", tmp_path)
    check_style(folder)
