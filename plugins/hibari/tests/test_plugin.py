"""What a stranger's plugin owes: found by name, cheap to import, files that are checked."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from polymux_hibari import Speech
from polymux_hibari.source import HibariSource

from polymux.core.errors import ModelError
from polymux.core.models import ModelFiles, resolve
from polymux.core.plugins import load_plugins
from polymux.core.testing.conformance import run_checks


def test_the_entry_point_is_found_and_works(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    plugins = load_plugins()
    (record,) = (record for record in plugins.records if record.name == "hibari")
    assert record.fault is None
    files = resolve("hibari:heart", sources=plugins.model_sources())
    assert plugins.choose_pipeline(files).name == Speech.name
    assert record.fault is None


def test_what_the_gateway_process_imports_leaves_torch_alone() -> None:
    code = (
        "import sys, polymux_hibari, polymux_hibari.front\n"
        "polymux_hibari.pipelines(), polymux_hibari.model_sources()\n"
        "print('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "False"


@pytest.mark.parametrize("name", ["", "nobody", "heart,nobody"])
def test_voices_that_do_not_exist(name: str) -> None:
    with pytest.raises(ModelError, match="there are: heart"):
        HibariSource().resolve(name, sha256=None, report=print)
    assert not HibariSource().is_fetched(name, sha256=None)


def test_files_are_checked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    source = HibariSource()
    assert not source.is_fetched("heart", sha256=None)
    with pytest.raises(ModelError, match="expected 0000"):
        source.resolve("heart", sha256="0" * 64, report=print)
    source.resolve("heart", sha256=None, report=print)
    assert source.is_fetched("heart", sha256=None)


def test_a_voice_that_cannot_be_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The message says where from and where to, so that a person can copy the file by hand."""
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    monkeypatch.setenv("HIBARI_HOME", str(tmp_path / "hibari"))
    monkeypatch.setattr("hibari.voices.BASE_URL", "http://127.0.0.1:9/")
    told: list[str] = []
    with pytest.raises(ModelError, match=r"copy the file to .*bf_emma"):
        HibariSource().resolve("emma", sha256=None, report=told.append)
    assert told == ["downloading the voice emma"]


def test_a_folder_without_voices_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "hibari"}')
    files = ModelFiles("hibari:broken", tmp_path)
    assert Speech().accepts(files)
    with pytest.raises(ModelError, match="names no voices"):
        Speech().front(files, {})


@pytest.mark.slow
def test_it_passes_the_check() -> None:
    assert run_checks("hibari") == 0
