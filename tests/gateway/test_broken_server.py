"""A running server with a folder of plugins, each broken in a way of its own: it is up, and says which and why."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from polymux.core.plugins.registry import HOOKS
from polymux.core.testing.command import run_server

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ROOT = Path(__file__).parent.parent.parent
HOOK = "from polymux import hookimpl\n"
GOOD = (
    HOOK
    + "from polymux.core.vocabulary import NamedModel\n"
    + "@hookimpl\ndef named_models(): return [NamedModel('good/names', 'names:stars', default=True)]\n"
)
"""Makes the tutorial's model one of those that are served unasked."""

TASK = """
import msgspec
from polymux import hookimpl
from polymux.core.tasks import Done
from polymux.core.vocabulary import Route, Task
class Ask(msgspec.Struct):
    text: str
class Answer(msgspec.Struct):
    length: int
@hookimpl
def tasks(): return [Task({name!r}, Ask, (Answer, Done), Route("POST", {path!r}))]
"""

MIDDLEWARE = """
from polymux import hookimpl
class Layer:
    def __init__(self, app): self.app = app
    async def __call__(self, scope, receive, send): raise ValueError("boom")
@hookimpl
def middleware():
    from starlette.middleware import Middleware
    return [Middleware(Layer)]
"""

PIPELINE = """
from polymux import hookimpl
from polymux.core.vocabulary import NamedModel
from polymux_example import Names
class Odd(Names):
    name = {name!r}
    {method}
@hookimpl
def pipelines(): return [Odd()]
@hookimpl
def named_models(): return [NamedModel("{name}/model", "names:flowers", pipeline={name!r}, default=True)]
"""

RUN = """def load(self, files, site, options):
        program = super().load(files, site, options)
        async def run(job, work): raise ValueError("boom")
        program.run = run
        return program"""

ASKED_BY_THE_CHECK = ("examples", "checks")

FAILED: dict[str, tuple[str, str]] = {
    "import_error": ("import surely_not_installed", "surely_not_installed"),
    "syntax_error": ("def broken(:", "SyntaxError"),
    "exits": ("import sys\nsys.exit(3)", "SystemExit"),
    "wrong_signature": (HOOK + "@hookimpl\ndef tasks(device): return []", "device"),
    "unknown_hook": (HOOK + "@hookimpl\ndef pipeline(): return []", "did you mean 'pipelines'"),
    "wrong_level": ("POLYMUX_API_LEVEL = 99", "level 99"),
    "no_list": (HOOK + "@hookimpl\ndef tasks(): return 5", "int, not a list"),
    "hangs_at_import": ("import time\ntime.sleep(3600)", "did not come back within"),
    "hangs_in_a_hook": (HOOK + "import time\n@hookimpl\ndef routes(): time.sleep(3600)", "did not come back within"),
    "duplicate_name": (TASK.format(name="invent", path="/x/other"), "'invent' is already registered"),
    "taken_route": (TASK.format(name="mine", path="/v1/names"), "is taken"),
    "middleware_raises": (MIDDLEWARE, "ValueError: boom"),
    "front_raises": (PIPELINE.format(name="front_raises", method="front = None"), "front_raises.front: TypeError"),
    **{
        f"in_{hook}": (
            HOOK + f"@hookimpl\ndef {hook}({'app' if hook == 'commands' else ''}): raise ValueError('boom')",
            "boom",
        )
        for hook in HOOKS
        if hook not in ASKED_BY_THE_CHECK
    },
}
"""Name -> code, and what the reason says."""

NOTED: dict[str, tuple[str, str]] = {
    "prints": ("print('hello from a plugin')", "prints to standard output"),
    "leaks": ("KEPT = bytearray(150 << 20)\nKEPT[::4096] = b'x' * len(KEPT[::4096])", "MiB of memory"),
    "slow": ("import time\ntime.sleep(1.1)", "import is slow"),
    "load_raises": (PIPELINE.format(name="load_raises", method="load = None"), "load_raises.load: TypeError"),
}
"""Those that work otherwise, with a note."""

RUNS = {"run_raises": PIPELINE.format(name="run_raises", method=RUN)}
"""Breaks a request, and says so in its answer."""


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    folder = tmp_path_factory.mktemp("broken")
    plugins = folder / "plugins"
    shutil.copytree(ROOT / "plugins" / "example" / "polymux_example", folder / "packages" / "polymux_example")
    codes = {name: code for name, (code, _) in {**FAILED, **NOTED}.items()} | RUNS
    plugins.mkdir()
    (plugins / "good.py").write_text(GOOD)
    for name, code in codes.items():
        (plugins / f"{name}.py").write_text(code)
    (folder / "polymux.toml").write_text("[plugins]\npatience_seconds = 5\n")
    environment = {**os.environ, "PYTHONPATH": str(folder / "packages")}
    options = ["--plugin-dir", "plugins", "--disable-plugin", "starter"]
    with (
        run_server(folder, *options, environment=environment) as running,
        httpx.Client(base_url=running.url, timeout=60) as http,
    ):
        yield http


@pytest.fixture(scope="module")
def cards(client: httpx.Client) -> dict[str, Any]:
    ask_the_good_one(client)
    return {card["name"]: card for card in client.get("/v1/plugins").json()["data"]}


def ask_the_good_one(client: httpx.Client) -> None:
    answer = client.post("/v1/names", json={"model": "good/names", "count": 2, "seed": 7})
    assert answer.status_code == 200 and answer.text.endswith("data: [DONE]\n\n"), answer.text


def test_it_is_ready_and_the_others_work(client: httpx.Client, cards: dict[str, Any]) -> None:
    assert client.get("/readyz").status_code == 200
    assert client.get("/openapi.json").status_code == 200
    for name in ("core", "gateway", "llm", "example", "good"):
        assert cards[name]["status"] == "enabled", cards[name]


@pytest.mark.parametrize("name", FAILED)
def test_it_is_left_out_with_its_reason(name: str, cards: dict[str, Any]) -> None:
    card = cards[name]
    assert card["status"] == "failed", card
    assert f"plugin {name!r}" in card["reason"] and FAILED[name][1] in card["reason"], card["reason"]
    assert any(word in card["reason"] for word in (f"--disable-plugin {name}", "Upgrade", "Compare"))


@pytest.mark.parametrize("name", NOTED)
def test_it_works_with_a_note(name: str, cards: dict[str, Any]) -> None:
    assert cards[name]["status"] == "enabled", cards[name]
    assert NOTED[name][1] in " ".join(cards[name]["notes"]), cards[name]["notes"]


def test_what_raises_in_a_job_costs_that_job(client: httpx.Client) -> None:
    for _ in range(2):
        answer = client.post("/v1/names", json={"model": "run_raises/model", "count": 1})
        assert "error" in answer.text and "boom" not in answer.text, answer.text
        ask_the_good_one(client)
