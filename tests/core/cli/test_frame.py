"""The frame: options from anywhere, errors as one line, an exit status that says what kind of failure it was."""

from __future__ import annotations

import subprocess
import sys

import pytest

from polymux.core.cli import run
from polymux.core.cli.frame import split_options
from polymux.core.errors import ConfigError

VERB = """
import typer
from polymux import hookimpl
from polymux.core.errors import ModelError, Overloaded

@hookimpl
def commands(app):
    @app.command("greet")
    def greet(ctx: typer.Context, name: str):
        \"\"\"Greet somebody.\"\"\"
        print(f"hello {name}, {ctx.obj.settings.engine.max_rows}")

    @app.command("fail")
    def fail(how: str):
        raise {"busy": Overloaded("too much\\nto do"), "model": ModelError("no weights"), "bug": KeyError("x")}[how]
"""


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def verb(tmp_path) -> list[str]:
    (tmp_path / "verbs").mkdir()
    (tmp_path / "verbs" / "greeter.py").write_text(VERB)
    return ["--plugin-dir", str(tmp_path / "verbs")]


def test_a_plugin_brings_a_verb_from_a_folder_named_after_it(verb, capsys):
    assert run(["greet", "you", *verb]) == 0
    assert capsys.readouterr().out == "hello you, None\n"


def test_settings_reach_the_verb(verb, tmp_path, capsys):
    (tmp_path / "other.toml").write_text("[engine]\nmax_rows = 5\n")
    assert run([*verb, "greet", "--config", "other.toml", "you"]) == 0
    assert capsys.readouterr().out == "hello you, 5\n"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["fail", "busy"], 1, "polymux: error: too much to do\n"),
        (["fail", "model"], 3, "polymux: error: no weights\n"),
        (["fail", "bug"], 1, "this is a bug"),
        (["greet"], 2, "Missing argument"),
        (["grete"], 2, "No such command 'grete'"),
        (["greet", "--loud", "you"], 2, "No such option: --loud"),
        (["list", "--config", "missing.toml"], 2, "cannot read the configuration missing.toml"),
        (["list", "--plugin-dir", "missing"], 2, "plugin folder missing does not exist"),
        (["list", "--disable-plugin", "stater"], 2, "cannot disable unknown plugin stater"),
        (["list", "--config"], 2, "argument --config: expected one argument"),
    ],
)
def test_errors_are_lines_and_the_status_tells_them_apart(verb, capsys, arguments, status, message):
    assert run([*arguments, *verb] if "--config" not in arguments[-1] else [*verb, *arguments]) == status
    printed = capsys.readouterr()
    assert message in printed.err and "Traceback" not in printed.err
    assert printed.out == ""


def test_a_wrong_setting_in_the_environment_is_usage(capsys, monkeypatch):
    monkeypatch.setenv("POLYMUX_PROT", "1")
    assert run(["list"]) == 2
    assert "unknown variable POLYMUX_PROT" in capsys.readouterr().err


def test_what_follows_a_double_dash_is_the_verbs():
    own, rest = split_options(["run", "--config=a.toml", "model", "--", "--config", "b"])
    assert str(own.config) == "a.toml" and rest == ["run", "model", "--", "--config", "b"]


def test_options_are_never_abbreviated():
    assert split_options(["--conf", "x"])[1] == ["--conf", "x"]
    with pytest.raises(ConfigError):
        split_options(["--plugin-dir"])


def test_version_and_help(capsys):
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "0.1.0\n"
    assert run(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(verb in text for verb in ("run", "pull", "list", "plugins", "doctor", "serve", "--plugin-dir"))
    assert run([]) in (0, 2), "0 before click 8.2, 2 since"


def test_help_imports_nothing_heavy():
    """`polymux --help` answers in under half a second; these are what would cost it."""
    code = (
        "import sys; from polymux.core.cli import run; run(['--help'])\n"
        "heavy = ('torch', 'transformers', 'numpy', 'pydantic', 'starlette', 'zmq', 'huggingface_hub', 'rich')\n"
        "print([name for name in heavy if name in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr.strip() == "[]"


def test_a_reader_that_has_seen_enough_is_no_traceback():
    done = subprocess.run(
        f"{sys.executable} -m polymux plugins --json | head -c 1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout == "[" and "Traceback" not in done.stderr
