"""An engine that is told nothing takes what its device has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polymux.core.engine.defaults import choose_settings
from polymux.core.errors import ConfigError

CARD = torch.device("cuda", 0)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model of 2 GiB (a sparse file) and a card of 16 GiB."""
    (tmp_path / "vae").mkdir()
    with (tmp_path / "vae" / "model.safetensors").open("wb") as file:
        file.truncate(2 << 30)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (15 << 30, 16 << 30))
    return tmp_path


def test_the_cache_gets_what_the_weights_leave(folder: Path) -> None:
    settings = choose_settings(CARD, [folder], {})
    assert 7 << 30 < settings["cache_bytes"] < 10 << 30


def test_what_the_user_sets_counts(folder: Path) -> None:
    settings = choose_settings(CARD, [folder], {"cache_bytes": 123, "max_rows": 7})
    assert settings["cache_bytes"] == 123
    assert settings["max_rows"] == 7


def test_weights_without_room_for_a_cache_are_refused_with_a_way_out(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"takes 14\.0 GiB.*cache_bytes"):
        choose_settings(CARD, [folder] * 6, {})


def test_a_cpu_keeps_the_sites_own(folder: Path) -> None:
    assert choose_settings(torch.device("cpu"), [folder], {"max_rows": 3}) == {"max_rows": 3}
