"""`polymux paint`: files of pictures, a bar of the steps, and clear words for what cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest
from PIL import Image

from polymux.core.cli.frame import run
from polymux.core.testing.pipelines import save_tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sd")
    save_tiny("sd", folder)
    return folder


@pytest.mark.slow
def test_pictures_are_written_and_their_seeds_said(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "fox.png"
    options = ["--size", "32x16", "--steps", "3", "--seed", "5", "--n", "2"]
    assert run(["paint", str(folder), "a fox", "--out", str(out), *options]) == 0
    assert not out.exists()
    for number in (0, 1):
        with Image.open(tmp_path / f"fox-{number}.png") as picture:
            assert picture.size == (32, 16)
    said = capfd.readouterr().err
    assert "seed 5" in said
    assert "seed 6" in said


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "fox.bmp"], ".png"),
        (["--out", "nowhere/fox.png"], "no folder"),
        (["--out", "fox.png", "--size", "big"], "no size"),
        (["--out", "fox.png", "--size", "²x²"], "no size"),
        (["--out", "fox.png", "--adapter", "calm"], "calm"),
    ],
)
def test_what_cannot_be_painted_is_said_before_anything_loads(
    folder: Path,
    options: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["paint", str(folder), "a fox", *options]) != 0
    assert said in capfd.readouterr().err
