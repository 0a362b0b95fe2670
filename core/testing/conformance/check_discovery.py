"""A plugin is found, cheap to look at, honest about its level, and broken in a way that a person can act on."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from polymux.core.models.resolve import SCHEME
from polymux.core.plugins import Plugin, Plugins
from polymux.core.testing.conformance.seal import Seal
from polymux.core.testing.plugins import make_plugin, make_plugins

CHEAP_HOOKS = ("tasks", "pipelines", "named_models", "model_sources", "routes", "middleware", "call_formats")
LIST_HOOKS = (*CHEAP_HOOKS, "checks")
ENGINE_HOOKS = ("attention_backends", "quantizers", "step_caches", "drafters")

FORBIDDEN = ("torch.load", "pickle.load", "pickle.loads", "joblib.load", "numpy.load", "np.load", "eval", "exec")


def test_it_loads(record: Plugin, plugins: Plugins) -> None:
    for hook in record.hooks:
        if hook in LIST_HOOKS + ENGINE_HOOKS:
            plugins.answers(hook)
    plugins.examples(record.name)
    assert record.status == "enabled", str(record.fault or record.reason)
    assert record.hooks, "it implements no hook"


def test_it_states_its_api_level(record: Plugin) -> None:
    assert getattr(record.module, "POLYMUX_API_LEVEL", None) is not None, "add POLYMUX_API_LEVEL = 1 to the module"


def test_nothing_is_to_be_noted(record: Plugin) -> None:
    """No prints, no memory taken at start, nothing that the next level drops. How slow a hook is, is not judged here:
    the machine may be busy; `polymux plugins --trace` tells."""
    assert [note for note in record.notes if " is slow: " not in note] == []


def test_discovery_leaves_torch_alone(record: Plugin, folders: list[Path]) -> None:
    code = (
        "import sys; from pathlib import Path; from polymux.core.plugins import load_plugins\n"
        f"plugins = load_plugins([Path(each) for each in {[str(folder) for folder in folders]!r}])\n"
        f"[plugins.answers(hook) for hook in {CHEAP_HOOKS!r}]\n"
        "print([name for name in ('torch', 'transformers', 'diffusers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", f"importing it imports {done.stdout}{done.stderr}: import inside of functions"


def test_loading_twice_gives_the_same(record: Plugin, plugins: Plugins) -> None:
    again = make_plugins(Plugin(record.name, record.origin, lambda: record.module))
    for hook in record.hooks:
        if hook in LIST_HOOKS + ENGINE_HOOKS:
            first = [values for plugin, values in plugins.answers(hook) if plugin is record]
            assert [len(values) for _, values in again.answers(hook)] == [len(values) for values in first]


def test_a_fault_names_plugin_hook_and_next_action(record: Plugin) -> None:
    for hook in record.hooks:
        if hook in (*LIST_HOOKS, "examples"):
            broken = make_plugins(make_plugin(record.name, **{hook: _raise}))
            broken.answers(hook)
            fault = str(broken.records[0].fault)
            assert record.name in fault and hook in fault and "--disable-plugin" in fault


def _raise() -> list[object]:
    raise RuntimeError("on purpose")


def test_nothing_unpickles_or_runs_code_of_files(record: Plugin) -> None:
    for path in own_files(record):
        for line, name in find_calls(ast.parse(path.read_text(encoding="utf-8"))):
            assert name not in FORBIDDEN, f"{path}:{line}: {name}: read safetensors"
            assert name != "trust_remote_code", f"{path}:{line}: code of a model's repository is never run"


def own_files(record: Plugin) -> list[Path]:
    home = Path(str(getattr(record.module, "__file__", "")))
    return sorted(home.parent.rglob("*.py")) if home.name in ("__init__.py", "plugin.py") else [home]


def find_calls(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node.lineno, ast.unparse(node.func)
            for keyword in node.keywords:
                if keyword.arg == "trust_remote_code" and ast.unparse(keyword.value) == "True":
                    yield node.lineno, "trust_remote_code"


def test_sources_look_without_raising(record: Plugin, plugins: Plugins) -> None:
    from polymux.core.errors import ModelError

    for plugin, sources in plugins.answers("model_sources"):
        for source in sources if plugin is record else ():
            assert SCHEME.fullmatch(f"{source.scheme}:x"), f"{source.scheme!r} is no scheme: letters, digits, + and -"
            assert source.is_fetched("surely/not-there", sha256=None) is False
            with pytest.raises(ModelError):
                source.resolve("surely/not-there", sha256=None, report=lambda line: None)


def test_its_models_can_be_resolved_by_somebody(record: Plugin, plugins: Plugins) -> None:
    from polymux.core.models.resolve import find_source

    for plugin, models in plugins.answers("named_models"):
        for model in models if plugin is record else ():
            find_source(model.reference, plugins.model_sources())


def test_verbs_explain_themselves(record: Plugin) -> None:
    import typer
    from typer.testing import CliRunner

    if "commands" not in record.hooks:
        pytest.skip("it brings no verb")
    app = typer.Typer()
    app.command("nothing")(lambda: None)
    make_plugins(Plugin(record.name, record.origin, lambda: record.module)).add_commands(app)
    added = [command.name for command in app.registered_commands if command.name != "nothing"]
    added += [group.name for group in app.registered_groups]
    assert added, "its hook `commands` adds no verb"
    for name in added:
        shown = CliRunner().invoke(app, [str(name), "--help"])
        assert shown.exit_code == 0 and len(shown.output.split()) > 5, f"polymux {name} --help says too little"


def test_no_network_was_tried(seal: Seal) -> None:
    assert not [attempt for attempt in seal.attempts if attempt.startswith("connect")], seal.attempts
