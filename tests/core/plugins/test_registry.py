"""A broken plugin is disabled with a reason that names plugin, hook, place and next action; the rest load and work."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

from polymux import hookimpl
from polymux.core.errors import ConfigError, ModelError
from polymux.core.models import ModelFiles
from polymux.core.pipeline import Pipeline
from polymux.core.plugins import Plugin, Plugins, load_plugins
from polymux.core.vocabulary import API_LEVEL, NamedModel

GOOD = """
from polymux import hookimpl
from polymux.core.vocabulary import NamedModel

@hookimpl
def named_models():
    return [NamedModel(name="good/model", reference="./nowhere")]
"""

BROKEN = {
    "import_error": ("import surely_not_installed", "import", "surely_not_installed"),
    "syntax_error": ("def broken(:", "import", "SyntaxError"),
    "exits": ("raise SystemExit(3)", "import", "SystemExit"),
    "raises_at_import": ("x = {}['missing']", "import", "KeyError"),
    "newer_level": (f"POLYMUX_API_LEVEL = {API_LEVEL + 1}", "contract", f"level {API_LEVEL + 1}"),
    "odd_level": ("POLYMUX_API_LEVEL = 'one'", "contract", "not a whole number"),
    "unknown_argument": (
        "from polymux import hookimpl\n@hookimpl\ndef pipelines(device): return []",
        "signature",
        "device",
    ),
    "unknown_hook": (
        "from polymux import hookimpl\n@hookimpl\ndef pipeline(): return []",
        "contract",
        "did you mean 'pipelines'?",
    ),
    "wrapper": (
        "from polymux import hookimpl\n@hookimpl(wrapper=True)\ndef tasks():\n    return (yield)",
        "contract",
        "wrapper",
    ),
    "hook_raises": (
        "from polymux import hookimpl\n@hookimpl\ndef named_models(): raise ValueError('boom')",
        "named_models",
        "ValueError: boom",
    ),
    "no_list": (
        "from polymux import hookimpl\n@hookimpl\ndef named_models(): return None",
        "named_models",
        "NoneType",
    ),
    "wrong_kind": (
        "from polymux import hookimpl\n@hookimpl\ndef named_models(): return ['starter/chat']",
        "named_models",
        "a str where a NamedModel belongs",
    ),
    "taken_name": (
        GOOD,
        "named_models",
        "'good/model' is already registered by plugin 'good'",
    ),
}


def write(folder: Path, **codes: str) -> Path:
    for name, code in codes.items():
        (folder / f"{name}.py").write_text(code)
    return folder


def find(plugins: Plugins, name: str) -> Plugin:
    return next(record for record in plugins.records if record.name == name)


def ask_all(plugins: Plugins) -> None:
    for hook in (plugins.tasks, plugins.pipelines, plugins.named_models, plugins.model_sources):
        hook()


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_plugin_costs_only_itself(tmp_path, case):
    code, hook, message = BROKEN[case]
    # "good" is before and "later" after it in the order of loading
    write(tmp_path, good=GOOD, it_breaks=code, later=GOOD.replace("good/model", "later/model"))
    plugins = load_plugins([tmp_path])
    ask_all(plugins)
    broken = find(plugins, "it_breaks")
    assert broken.status == "failed"
    assert hook in broken.fault.hook and "it_breaks" in broken.fault.hook
    assert message in broken.fault.message
    assert str(tmp_path / "it_breaks.py") in broken.fault.where
    assert broken.fault.advice
    names = [model.name for model in plugins.named_models()]
    assert "good/model" in names and "later/model" in names
    assert find(plugins, "core").status == "enabled"


def test_the_reason_names_the_line(tmp_path):
    write(tmp_path, it_breaks="from polymux import hookimpl\n\n@hookimpl\ndef tasks():\n    return 1 / 0\n")
    plugins = load_plugins([tmp_path])
    plugins.tasks()
    assert find(plugins, "it_breaks").fault.where == f"{tmp_path / 'it_breaks.py'}:5"


def test_a_misspelt_hook_is_not_taken_for_another_api_level(tmp_path):
    write(tmp_path, it_breaks="from polymux import hookimpl\n\n@hookimpl\ndef task():\n    return []\n")
    fault = find(load_plugins([tmp_path]), "it_breaks").fault
    assert "did you mean 'tasks'?" in fault.message
    assert "polymux.core.hooks" in fault.advice


def test_an_import_that_fails_names_its_line_where_the_folder_is_relative(tmp_path, monkeypatch):
    (tmp_path / "project" / "it_breaks").mkdir(parents=True)
    (tmp_path / "project" / "it_breaks" / "__init__.py").write_text("import json\nimport nosuchthing\n")
    (tmp_path / "project" / "pyproject.toml").write_text('[project.entry-points.polymux]\nit_breaks = "it_breaks"\n')
    monkeypatch.chdir(tmp_path)
    fault = find(load_plugins([Path("project")]), "it_breaks").fault
    assert fault.where.endswith("project/it_breaks/__init__.py:2")


def test_a_plugin_that_raises_in_one_hook_counts_in_none(tmp_path):
    code = GOOD + "\n@hookimpl\ndef pipelines():\n    raise RuntimeError\n"
    plugins = load_plugins([write(tmp_path, half=code)])
    assert "good/model" in [model.name for model in plugins.named_models()]
    plugins.pipelines()
    assert "good/model" not in [model.name for model in plugins.named_models()]


def test_an_entry_point_that_cannot_be_imported_leaves_the_others(tmp_path, monkeypatch):
    """pluggy's own loading stops at the first, and what sorts after it is silently absent."""
    information = tmp_path / "polymux_aaa-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: polymux-aaa\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[polymux]\naaa = surely_not_installed.plugin\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins = load_plugins()
    assert find(plugins, "aaa").status == "failed"
    assert find(plugins, "aaa").origin == "polymux-aaa 1.0"
    assert find(plugins, "llm").status == "enabled"


def test_two_plugins_of_one_name(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    for folder in (first, second):
        folder.mkdir()
        write(folder, voice=GOOD)
    plugins = load_plugins([first, second])
    one, two = (record for record in plugins.records if record.name == "voice")
    assert (one.status, two.status) == ("enabled", "failed")
    assert str(first) in two.fault.message


def test_a_folder_may_be_a_package_and_a_path_may_be_a_file(tmp_path):
    package = tmp_path / "voices"
    package.mkdir()
    (package / "__init__.py").write_text("from .models import named_models\n")
    (package / "models.py").write_text(GOOD)
    single = tmp_path / "single.py"
    single.write_text(GOOD.replace("good/model", "single/model"))
    plugins = load_plugins([package, single])
    assert {"good/model", "single/model"} <= {model.name for model in plugins.named_models()}


def test_a_plugin_file_shadows_no_module(tmp_path):
    import json

    plugins = load_plugins([write(tmp_path, json=GOOD)])
    assert find(plugins, "json").status == "enabled"
    assert sys.modules["json"] is json


def test_a_disabled_plugin_is_not_even_imported(tmp_path):
    write(tmp_path, it_breaks=f"open({str(tmp_path / 'ran')!r}, 'w')\n" + GOOD)
    plugins = load_plugins([tmp_path], disable=["it_breaks"])
    assert find(plugins, "it_breaks").status == "disabled"
    assert "good/model" not in [model.name for model in plugins.named_models()]
    assert not (tmp_path / "ran").exists()


def test_what_the_user_mistyped_is_told(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_plugins([tmp_path / "missing"])
    with pytest.raises(ConfigError, match="cannot disable unknown plugin stater"):
        load_plugins(disable=["stater"])


class Picky(Pipeline):
    tasks = ()

    def __init__(self, name: str, accepts: bool | Exception) -> None:
        self.name = name
        self._accepts = accepts

    def accepts(self, files):
        if isinstance(self._accepts, Exception):
            raise self._accepts
        return self._accepts

    def front(self, files, options):
        raise NotImplementedError

    def load(self, files, site, options):
        raise NotImplementedError


def bring(*pipelines: Pipeline) -> ModuleType:
    module = ModuleType("bringer")
    module.pipelines = hookimpl(lambda: list(pipelines), specname="pipelines")
    return module


def test_a_pipeline_is_chosen_by_what_it_accepts_or_by_name(tmp_path):
    plugins = Plugins()
    plugins.register(Plugin("rude", "here", lambda: bring(Picky("rude", RuntimeError("no config")))))
    plugins.register(Plugin("kind", "here", lambda: bring(Picky("never", False), Picky("always", True))))
    files = ModelFiles("./model", tmp_path)
    assert plugins.choose_pipeline(files).name == "always"
    assert find(plugins, "rude").status == "failed"
    assert plugins.choose_pipeline(files, "never").name == "never"
    with pytest.raises(ModelError, match="no pipeline is called 'nope'; there are: always, never"):
        plugins.choose_pipeline(files, "nope")


def test_a_model_that_nobody_accepts_is_an_error_that_names_it(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "mystery"}')
    plugins = Plugins()
    plugins.register(Plugin("kind", "here", lambda: bring(Picky("never", False))))
    with pytest.raises(ModelError, match=r"no pipeline accepts ./model \(mystery\). Pipelines: never"):
        plugins.choose_pipeline(ModelFiles("./model", tmp_path))


def test_a_plugins_attention_is_tried_before_the_one_of_those_registered_earlier(tmp_path):
    """Core registers first: its backends would otherwise always win."""
    code = """
from polymux import hookimpl
from polymux.core.compute.sdpa import SdpaAttention
class {0}(SdpaAttention):
    name = "{0}"
@hookimpl
def attention_backends():
    return [{0}()]
"""
    broken = "from polymux import hookimpl\n@hookimpl\ndef attention_backends(): return ['fast']"
    folder = write(tmp_path, a=code.format("first"), b=code.format("second"), c=broken)
    plugins = load_plugins([folder])
    assert [backend.name for backend in plugins.attention_backends()][:2] == ["second", "first"]
    assert "a str where a AttentionBackend belongs" in str(find(plugins, "c").fault)


def test_every_hook_is_called_once(tmp_path):
    calls = []
    module = ModuleType("counted")
    module.named_models = hookimpl(lambda: calls.append(1) or [NamedModel("a", "b")], specname="named_models")
    plugins = Plugins()
    plugins.register(Plugin("counted", "here", lambda: module))
    assert plugins.named_models() == plugins.named_models()
    assert len(calls) == 1


def test_the_description_serves_people_and_programs(tmp_path):
    plugins = load_plugins([write(tmp_path, it_breaks="import surely_not_installed")])
    facts = {each["name"]: each for each in plugins.describe()}
    assert facts["it_breaks"]["status"] == "failed" and "surely_not_installed" in facts["it_breaks"]["reason"]
    assert list(facts["core"].pop("trace")) == ["import"]
    assert facts["core"] == {
        "name": "core",
        "origin": "built-in",
        "status": "enabled",
        "api_level": 1,
        "hooks": ["attention_backends", "checks", "commands", "model_sources", "tasks"],
        "reason": None,
        "notes": [],
    }
