"""What core's verbs print: a table for a person, JSON for a program, news on stderr only."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import save_file

from polymux.core.cli import chat, doctor, run
from polymux.core.errors import InvalidRequest
from polymux.core.testing.service import FakeServed, FakeService


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    save_file({"weight": np.zeros(1, np.float32)}, folder / "model.safetensors")
    return folder


# ---- list, pull, plugins -----------------------------------------------------------------------------------------


def test_list_shows_names_and_whether_the_files_are_here(model, tmp_path, capsys):
    (tmp_path / "polymux.toml").write_text(
        '[models.here]\nreference = "./model"\naliases = ["gpt-x"]\n[models.gone]\nreference = "./gone"\n'
    )
    assert run(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "DEFAULT", "FETCHED", "ALIASES", "REFERENCE"]
    assert lines[1].split()[:4] == ["here", "yes", "yes", "gpt-x"]
    assert lines[2].split()[:4] == ["gone", "yes", "no", "-"]
    assert run(["list", "--json"]) == 0
    listed = {each["name"]: each for each in json.loads(capsys.readouterr().out)}
    assert listed["here"]["fetched"] and not listed["gone"]["fetched"]
    assert listed["starter/chat"]["default"] is False, "configured models take the place of the starters"


def test_aliases_of_starters_can_be_switched_off(capsys, monkeypatch):
    monkeypatch.setenv("POLYMUX_STARTERS_ALIASES", "false")
    assert run(["list", "--json"]) == 0
    assert all(each["aliases"] == [] for each in json.loads(capsys.readouterr().out))


def test_pull_goes_on_after_a_failure_and_says_so(model, capsys):
    assert run(["pull", "./missing", "./model"]) == 1
    printed = capsys.readouterr()
    assert "there is no folder './missing'" in printed.err
    assert printed.out == f"./model  {model}\n"
    assert run(["pull", "./model", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == [{"name": "./model", "reference": "./model", "folder": str(model)}]


def test_pull_without_anything_to_pull(capsys, monkeypatch):
    monkeypatch.setenv("POLYMUX_STARTERS_ENABLED", "false")
    assert run(["pull"]) == 2
    assert "there is no default model" in capsys.readouterr().err


def test_plugins_shows_the_reason(tmp_path, capsys):
    (tmp_path / "sad.py").write_text("import surely_not_installed")
    assert run(["plugins", "--plugin-dir", "sad.py"]) == 0
    printed = capsys.readouterr()
    assert "surely_not_installed" in printed.out and "--disable-plugin sad" in printed.out
    assert run(["plugins", "--json", "--plugin-dir", "sad.py", "--disable-plugin", "sad"]) == 0
    listed = {each["name"]: each["status"] for each in json.loads(capsys.readouterr().out)}
    assert listed["sad"] == "disabled" and listed["core"] == "enabled"


# ---- doctor ------------------------------------------------------------------------------------------------------


def test_doctor_explains_a_torchaudio_that_does_not_import(monkeypatch):
    """transformers imports torchaudio whenever it is installed, so this breaks every model and looks like anything."""

    def fail(code: str) -> str:
        raise doctor.ProbeFailed("OSError: libcudart.so.13: cannot open shared object file")

    monkeypatch.setattr(doctor, "probe", fail)
    finding = doctor.check_torchaudio()
    assert finding.status == "broken" and "libcudart" in finding.detail
    assert "pip install --force-reinstall torch torchaudio" in finding.advice


def test_a_probe_survives_a_crash_and_tells_its_last_words():
    assert doctor.probe("print('fine')") == "fine\n"
    with pytest.raises(doctor.ProbeFailed, match="ModuleNotFoundError: No module named 'surely_not_installed'"):
        doctor.probe("import surely_not_installed")
    with pytest.raises(doctor.ProbeFailed, match="exit status -11"):
        doctor.probe("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")


def test_a_cache_that_cannot_be_written_is_broken(monkeypatch, tmp_path):
    monkeypatch.setenv("POLYMUX_HOME", "/proc/polymux")
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    assert doctor.check_cache().status == "broken"


@pytest.mark.slow
def test_doctor_examines_this_machine(capsys):
    assert run(["doctor", "--json"]) == 0
    findings = {each["check"]: each for each in json.loads(capsys.readouterr().out)}
    assert set(findings) == {"python", "torch", "torchaudio", "attention", "plugins", "cache", "disk", "processes"}
    assert "cpu" in findings["torch"]["detail"] and "sdpa" in findings["attention"]["detail"]


# ---- run ---------------------------------------------------------------------------------------------------------


def test_an_answer_is_streamed_and_returned(capsys):
    service = FakeService()
    assert asyncio.run(chat.answer(service, [{"role": "user", "content": "hi"}])) == "Hello, this is a stub."
    assert capsys.readouterr().out == "Hello, this is a stub.\n"
    assert service.finished == 1 and service.opened[0].ask.sampling.temperature == 0.0


def test_a_conversation_remembers_and_ends_with_the_input(monkeypatch, capsys):
    service, lines = FakeService(), iter(["first", "", "second"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end(lines))
    with asyncio.Runner() as runner:
        chat.converse(runner, service)
    contents = [message["content"] for message in service.opened[-1].ask.messages]
    assert contents == ["first", "Hello, this is a stub.", "second"]


def _end(lines) -> str:
    rest = next(lines, None)
    if rest is None:
        raise EOFError
    return rest


def test_an_error_does_not_end_a_conversation(monkeypatch, capsys):
    async def refuse(served, task, ask):
        raise InvalidRequest("too long")
        yield

    service, lines = FakeService(script=refuse), iter(["first"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(lines, None) or _end(lines))
    with asyncio.Runner() as runner:
        chat.converse(runner, service)
    assert "polymux: error: too long" in capsys.readouterr().err


def test_a_model_that_does_not_chat_is_told_before_it_is_loaded():
    service = FakeService(models=(FakeServed("vectors", tasks=("embed",)),))
    with pytest.raises(InvalidRequest, match="vectors serves embed, not chat"):
        chat.check_chats(service, "vectors")


@pytest.mark.slow
def test_run_answers_a_prompt_from_the_argument_or_a_pipe(tmp_path):
    """The whole way: assembly, an engine process, the starter's answer on stdout and nothing else there."""
    question = "What is the capital of France?"
    for arguments, text in (([question], None), ([], question)):
        done = subprocess.run(
            [sys.executable, "-m", "polymux", "run", "starter/chat", *arguments],
            input=text,
            capture_output=True,
            text=True,
            timeout=240,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "The capital of France is Paris.\n"
