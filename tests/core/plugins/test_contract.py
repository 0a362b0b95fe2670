"""The contract is frozen at its level, and documented whole."""

from __future__ import annotations

import inspect
from pathlib import Path

from polymux.core import hooks
from polymux.core.plugins.contract import PUBLIC, find_undocumented, write_contract
from polymux.core.plugins.kinds import FREE, KINDS, LATE
from polymux.core.plugins.registry import HOOKS
from polymux.core.vocabulary import API_LEVEL

ROOT = Path(__file__).parent.parent.parent.parent

LEVEL_1 = {
    "attention_backends": [],
    "call_formats": [],
    "checks": [],
    "commands": ["app"],
    "drafters": [],
    "examples": [],
    "middleware": [],
    "model_sources": [],
    "named_models": [],
    "pipelines": [],
    "quantizers": [],
    "routes": [],
    "step_caches": [],
    "tasks": [],
}
"""What a plugin of level 1 may implement. Nothing is taken away from it, and no argument is renamed."""


def test_the_hooks_of_level_1_stay() -> None:
    assert API_LEVEL == 1
    found = {name: list(inspect.signature(getattr(hooks, name)).parameters) for name in HOOKS}
    for name, arguments in LEVEL_1.items():
        assert name in found, f"the hook {name} is gone: mark it with warn_on_impl and raise the level"
        assert found[name][: len(arguments)] == arguments, f"an argument of {name} was renamed"
    assert set(found) == set(LEVEL_1), "a new hook belongs into LEVEL_1"


def test_every_list_hook_says_what_it_holds() -> None:
    assert set(KINDS) | set(LATE) | set(FREE) == set(LEVEL_1) - {"commands"}


def test_everything_public_is_documented() -> None:
    assert find_undocumented() == []


def test_the_search_for_missing_words_finds_them(monkeypatch) -> None:
    def commands(app: object) -> None:
        """Add verbs."""

    monkeypatch.setattr(hooks, "commands", hooks.hookspec(commands))
    assert find_undocumented() == ["hook commands, argument app"]
    monkeypatch.setattr(commands, "__doc__", None)
    assert "hook commands" in find_undocumented()


def test_the_page_shows_every_hook_and_name() -> None:
    page = write_contract()
    for name in HOOKS:
        assert f"### `{name}`" in page
    for names in PUBLIC.values():
        for name in names:
            assert f"#### {name}\n" in page
    assert "<!-- contract -->" in (ROOT / "docs" / "contract.md").read_text()
