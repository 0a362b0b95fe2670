"""A plugin broken in any way costs itself: the server is up, the others answer, and /v1/plugins says why."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer

from polymux.core.assembly import gather_halves
from polymux.core.config import Settings
from polymux.core.plugins import Plugins, load_plugins
from polymux.core.plugins.registry import HOOKS
from polymux.core.tasks import Done
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.testing import open_gateway

pytestmark = pytest.mark.anyio

HEAD = """
import msgspec
from pydantic import BaseModel
from polymux import hookimpl
from polymux.core.pipeline import Front, Pipeline, Program
from polymux.core.tasks import Done
from polymux.core.vocabulary import NamedModel, Route, Task

class Ask(msgspec.Struct):
    text: str

class Answer(msgspec.Struct):
    length: int
"""

GOOD = (
    HEAD
    + """
@hookimpl
def tasks():
    return [Task("measure", Ask, (Answer, Done), Route("POST", "/x/measure"))]

@hookimpl
def routes():
    from starlette.responses import PlainTextResponse
    from starlette.routing import Route
    return [Route("/x/page", lambda request: PlainTextResponse("page"))]
"""
)

LIST_HOOKS = ("tasks", "pipelines", "named_models", "model_sources", "routes", "middleware")

MIDDLEWARE = """
from polymux import hookimpl
class Layer:
    def __init__(self, app):
        {init}
        self.app = app
    async def __call__(self, scope, receive, send):
        {call}
        await self.app(scope, receive, send)
@hookimpl
def middleware():
    from starlette.middleware import Middleware
    return [Middleware(Layer)]
"""

WAYS: dict[str, tuple[str, str, str]] = {
    "import_error": ("import surely_not_installed", "import", "surely_not_installed"),
    "syntax_error": ("def broken(:", "import", "SyntaxError"),
    "exits": ("import sys\nsys.exit(3)", "import", "SystemExit"),
    "wrong_signature": (HEAD + "@hookimpl\ndef tasks(device):\n    return []", "signature", "device"),
    "unknown_hook": (HEAD + "@hookimpl\ndef pipeline():\n    return []", "contract", "did you mean 'pipelines'"),
    "wrong_level": ("POLYMUX_API_LEVEL = 99", "contract", "level 99"),
    **{
        f"raises_in_{hook}": (
            HEAD + f"@hookimpl\ndef {hook}():\n    raise ValueError('boom')",
            hook,
            "ValueError: boom",
        )
        for hook in LIST_HOOKS
    },
    "hangs_at_import": ("import time\ntime.sleep(3600)", "import", "did not come back within 1 seconds"),
    "hangs_in_a_hook": (
        HEAD + "import time\n@hookimpl\ndef tasks():\n    time.sleep(3600)",
        "tasks",
        "did not come back within 1 seconds",
    ),
    "no_list": (HEAD + "@hookimpl\ndef tasks():\n    return 5", "tasks", "int, not a list"),
    "wrong_thing": (HEAD + "@hookimpl\ndef tasks():\n    return ['measure']", "tasks", "a str where a Task belongs"),
    "duplicate_name": (GOOD, "tasks", "'measure' is already registered by plugin 'good'"),
    "taken_route": (
        HEAD + "@hookimpl\ndef tasks():\n    return [Task('m2', Ask, (Answer,), Route('POST', '/x/measure'))]",
        "tasks: m2",
        "is taken; choose another path",
    ),
    "no_route": (HEAD + "@hookimpl\ndef routes():\n    return ['/page']", "routes", "a str where a Starlette route"),
    "middleware_cannot_be_made": (MIDDLEWARE.format(init="1 / 0", call="pass"), "middleware", "ZeroDivisionError"),
    "middleware_raises": (MIDDLEWARE.format(init="pass", call="1 / 0"), "middleware", "ZeroDivisionError"),
    "front_raises": (
        HEAD
        + "class P(Pipeline):\n    name = 'p'\n    tasks = ('measure',)\n"
        + "    def accepts(self, files): return files.config().get('model_type') == 'p'\n"
        + "    def front(self, files, options): raise KeyError('lost')\n"
        + "    def load(self, files, site, options): ...\n"
        + "@hookimpl\ndef pipelines(): return [P()]\n"
        + "@hookimpl\ndef named_models(): return [NamedModel('p/model', '{folder}', default=True)]",
        "pipelines: p.front",
        "KeyError: 'lost'",
    ),
    "accepts_raises": (
        HEAD
        + "class P(Pipeline):\n    name = 'p'\n    tasks = ('measure',)\n"
        + "    def accepts(self, files): return files.nonsense\n"
        + "    def front(self, files, options): ...\n"
        + "    def load(self, files, site, options): ...\n"
        + "@hookimpl\ndef pipelines(): return [P()]\n"
        + "@hookimpl\ndef named_models(): return [NamedModel('p/model', '{folder}', default=True)]",
        "pipelines: p.accepts",
        "nonsense",
    ),
    "source_raises": (
        HEAD
        + "from polymux.core.models import ModelSource\n"
        + "class S(ModelSource):\n    scheme = 'shelf'\n"
        + "    def resolve(self, name, *, sha256, report): raise OSError('the shelf fell down')\n"
        + "@hookimpl\ndef model_sources(): return [S()]\n"
        + "@hookimpl\ndef named_models(): return [NamedModel('p/model', 'shelf:x', default=True)]",
        "model_sources: shelf:",
        "the shelf fell down",
    ),
}


async def measure(served: Any, task: str, ask: Any) -> AsyncIterator[msgspec.Struct]:
    answer = next(kind for kind in (sys.modules["polymux_plugin_good"].Answer,))
    yield answer(len(ask.text))
    yield Done(Usage(), Receipt())


def load(tmp_path: Path, code: str) -> Plugins:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text('{"model_type": "p"}')
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "good.py").write_text(GOOD)
    (folder / "odd.py").write_text(code.replace("{folder}", str(model)))
    return load_plugins([folder], disable=["starter"], patience=1.0)


async def visit(plugins: Plugins) -> dict[str, Any]:
    """What /v1/plugins says about the odd one, once the rest has been shown to work."""
    service = FakeService(models=(FakeServed("m", ("measure", "chat")),), script=measure)
    async with open_gateway(service, plugins) as client:  # type: ignore[arg-type]
        for _ in range(2):
            answer = await client.post("/x/measure", json={"model": "m", "text": "four"})
            assert (answer.status_code, answer.json().get("length")) == (200, 4), answer.text
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/x/page")).text == "page"
        assert (await client.get("/openapi.json")).status_code == 200
        cards = {card["name"]: card for card in (await client.get("/v1/plugins")).json()["data"]}
    assert cards["good"]["status"] == "enabled" and cards["core"]["status"] == "enabled"
    return cards["odd"]


def choose_models(plugins: Plugins, told: list[str]) -> None:
    """The first thing a server does with the models that plugins bring."""
    settings: Any = Settings()
    try:
        gather_halves(settings, plugins, [], told.append)
    except Exception as error:
        told.append(f"{type(error).__name__}: {error}")
    plugins.pipelines(), plugins.model_sources()


@pytest.mark.parametrize("way", WAYS)
async def test_the_server_is_up_the_others_work_and_the_reason_is_shown(way: str, tmp_path: Path) -> None:
    code, hook, message = WAYS[way]
    plugins = load(tmp_path, code)
    told: list[str] = []
    choose_models(plugins, told)
    card = await visit(plugins)
    assert card["status"] == "failed", card
    assert f"plugin 'odd', {hook}" in card["reason"], card["reason"]
    assert message in card["reason"]
    assert "odd.py" in card["reason"], "where"
    assert any(word in card["reason"] for word in ("--disable-plugin odd", "Upgrade", "Compare")), "what to do next"


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("print('hello from a plugin')", "prints to standard output: 'hello from a plugin'"),
        ("KEPT = bytearray(150 << 20)\nKEPT[::4096] = b'x' * len(KEPT[::4096])", "MiB of memory"),
        ("import time\ntime.sleep(1.1)", "import is slow"),
    ],
    ids=["prints", "leaks", "slow"],
)
async def test_what_works_and_should_be_otherwise_is_noted(code: str, says: str, tmp_path: Path, capsys: Any) -> None:
    plugins = load_plugins_with(tmp_path, HEAD + code)
    card = await visit(plugins)
    assert card["status"] == "enabled"
    assert says in " ".join(card["notes"]), card["notes"]
    assert capsys.readouterr().out == "", "standard output is for data"


@pytest.mark.parametrize("hook", HOOKS)
def test_what_raises_in_any_hook_costs_its_plugin(hook: str, tmp_path: Path) -> None:
    """Those too that only an engine, the command line or the check calls."""
    argument = "app" if hook == "commands" else ""
    plugins = load_plugins_with(tmp_path, HEAD + f"@hookimpl\ndef {hook}({argument}):\n    raise ValueError('boom')")
    if hook == "commands":
        plugins.add_commands(typer.Typer())
    elif hook == "examples":
        assert plugins.examples("odd") == []
    else:
        plugins.answers(hook)
    odd = plugins.find("odd")
    assert odd.status == "failed" and odd.fault is not None
    assert (odd.fault.hook, odd.fault.message) == (f"plugin 'odd', {hook}", "ValueError: boom")
    assert plugins.find("good").status == "enabled" and plugins.find("core").status == "enabled"
    assert plugins.complain()["odd"].fault == str(odd.fault)


def load_plugins_with(tmp_path: Path, code: str) -> Plugins:
    folder = tmp_path / "plugins"
    folder.mkdir()
    (folder / "good.py").write_text(GOOD)
    (folder / "odd.py").write_text(code)
    return load_plugins([folder], disable=["starter"])


async def test_a_name_that_is_taken(tmp_path: Path) -> None:
    """The first of the two is served; the second says who was there."""
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "good.py").write_text(GOOD)
    plugins = load_plugins([tmp_path / "one", tmp_path / "two"])
    first, second = (record for record in plugins.records if record.name == "good")
    assert first.status == "enabled"
    assert "is already taken by" in str(second.fault) and "Rename one" in str(second.fault)


async def test_a_middleware_may_answer_by_itself_and_errors_behind_it_are_not_its_own(tmp_path: Path) -> None:
    call = (
        "if scope.get('path') == '/x/own':\n"
        "            await send({'type': 'http.response.start', 'status': 418, 'headers': []})\n"
        "            await send({'type': 'http.response.body', 'body': b''})\n"
        "            return"
    )
    plugins = load(tmp_path, MIDDLEWARE.format(init="pass", call=call))
    service = FakeService(models=(FakeServed("m", ("measure",)),), script=break_down)
    async with open_gateway(service, plugins) as client:  # type: ignore[arg-type]
        assert (await client.get("/x/own")).status_code == 418
        assert (await client.post("/x/measure", json={"model": "m", "text": "a"})).status_code == 500
        assert plugins.find("odd").status == "enabled"


async def break_down(served: Any, task: str, ask: Any) -> AsyncIterator[msgspec.Struct]:
    raise RuntimeError("the endpoint's own fault")
    yield Done(Usage(), Receipt())


def test_a_verb_that_is_taken_adds_nothing(tmp_path: Path) -> None:
    code = "from polymux import hookimpl\n@hookimpl\ndef commands(app):\n    app.command('serve')(lambda: None)\n"
    (tmp_path / "odd.py").write_text(code)
    plugins = load_plugins([tmp_path])
    app = typer.Typer()
    plugins.add_commands(app)
    assert [command.name for command in app.registered_commands].count("serve") == 1
    assert "the verb 'serve' is taken" in str(plugins.find("odd").fault)


def test_settings_enable_and_disable(tmp_path: Path) -> None:
    (tmp_path / "good.py").write_text(GOOD)
    only = load_plugins([tmp_path], enable=["good"])
    assert {record.name for record in only.records if record.status == "enabled"} == {"core", "good"}
    assert only.find("llm").describe()["reason"] == "not among plugins.enable"
    without = load_plugins([tmp_path], disable=["good"])
    assert "left out by plugins.disable" in without.find("good").describe()["reason"]
    assert "good" in without.left_out()


def test_what_the_next_level_drops_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook goes with a warning first: `warn_on_impl`."""
    from polymux.core import hooks
    from polymux.core.testing.plugins import make_plugin

    def routes() -> list[Any]:  # type: ignore[empty-body]
        """As it was."""

    warning = DeprecationWarning("the hook routes goes with API level 2: use pages")
    monkeypatch.setattr(hooks, "routes", hooks.hookspec(routes, warn_on_impl=warning))
    plugins = Plugins()
    plugins.register(make_plugin("old", routes=[]))
    assert plugins.find("old").status == "enabled"
    assert plugins.find("old").notes == ["the hook routes goes with API level 2: use pages"]
