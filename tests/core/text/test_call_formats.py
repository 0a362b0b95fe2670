"""Formats of calls that plugins bring: told by the template, with a grammar and a reader of their own if need be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymux.core.generation.front import GenerateFront
from polymux.core.plugins import load_plugins
from polymux.core.tasks import Chat
from polymux.core.testing import tokenizers
from polymux.core.text.calls import HERMES, CallFormat, CallReader, find_format
from polymux.core.text.grammar import Grammars
from polymux.core.text.parts import Part, Reader
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer

TEMPLATE = "{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}{{ messages[0].content }} <<call>>"
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}

MARKED = CallFormat("marked", "object", begin="<<call>>", end="<</call>>", sign="<<call>>")


class Bare(CallFormat):
    """Calls that are a name alone, such as `!f!`."""

    def write(self, tools: Any, tokenizer: Tokenizer, **options: Any) -> str:
        from polymux.core.text.grammar import pack_lark

        return pack_lark("start: " + " | ".join(f'"!{tool.name}!"' for tool in tools))

    def open_reader(self) -> Reader:
        return Names()


class Names(Reader):
    """Reads names between exclamation marks, whole."""

    def __init__(self) -> None:
        self._text = ""

    @property
    def held(self) -> int:
        return len(self._text)

    def push(self, text: str, end: int) -> list[Part]:
        self._text += text
        return []

    def flush(self, end: int) -> list[Part]:
        name, self._text = self._text.strip("!"), ""
        return [Part("call", name, end), Part("arguments", "{}", end)]


def open_front(formats: list[CallFormat]) -> GenerateFront:
    tokenizer = Tokenizer(tokenizers.byte_level(), special_tokens={"eos_token": "<|im_end|>"})
    return GenerateFront(tokenizer, ChatTemplate({"default": TEMPLATE}, {}), 512, tokenizer.size, formats)


def test_a_format_of_other_marks_is_data() -> None:
    assert find_format(TEMPLATE, [MARKED]) is MARKED
    assert find_format("tools <tool_call>", [MARKED]) is HERMES
    front = open_front([MARKED])
    work = front.prepare(
        "chat", Chat(messages=[{"role": "user", "content": "x"}], tools=[TOOL], tool_choice="required")
    )
    assert "<<call>>" in work.work.guidance.grammar  # type: ignore[union-attr]
    reader = CallReader(MARKED)
    parts = reader.push('Well. <<call>>{"name": "f", "arguments": {}}<</call>>', 60) + reader.flush(60)
    assert parts[0].kind == "text" and any("f" in part.text for part in parts[1:])


def test_a_format_of_its_own_kind_writes_its_grammar_and_reads_its_answers() -> None:
    bare = Bare("bare", "object", sign="<<call>>")
    front = open_front([bare])
    ask = Chat(messages=[{"role": "user", "content": "x"}], tools=[TOOL], tool_choice="required")
    prepared = front.prepare("chat", ask)
    assert "!f!" in prepared.work.guidance.grammar  # type: ignore[union-attr]
    Grammars(front.tokenizer, front.vocabulary).compile(prepared.work.guidance.grammar)  # type: ignore[union-attr]
    reader = prepared.notes.manner.open_reader()
    assert reader.push("!f!", 3) == [] and [part.kind for part in reader.flush(3)] == ["call", "arguments"]


def test_formats_come_by_hook(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from polymux.core.hooks import hookimpl\n"
        "from polymux.core.text.calls import CallFormat\n"
        "@hookimpl\n"
        "def call_formats():\n"
        "    return [CallFormat('mine', 'object', begin='[[', end=']]', sign='[[')]\n"
    )
    plugins = load_plugins([tmp_path])
    assert [format.name for format in plugins.call_formats()] == ["mine"]
    assert find_format("tools [[", plugins.call_formats()) is plugins.call_formats()[0]


def test_two_plugins_cannot_bring_the_same_format(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").write_text(
            "from polymux.core.hooks import hookimpl\n"
            "from polymux.core.text.calls import CallFormat\n"
            "@hookimpl\n"
            "def call_formats():\n"
            "    return [CallFormat('mine', 'object', sign='[[')]\n"
        )
    plugins = load_plugins([tmp_path])
    assert len(plugins.call_formats()) == 1
    assert [each["status"] for each in plugins.describe() if each["name"] in ("one", "two")].count("failed") == 1
