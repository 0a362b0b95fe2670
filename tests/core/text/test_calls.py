"""Calls of tools: for every format, what its grammar allows is what its reader reads, however the text is cut."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Format
from polymux.core.testing import tokenizers
from polymux.core.text.calls import (
    HERMES,
    LLAMA,
    MISTRAL,
    MISTRAL_NAMED,
    PLAIN,
    CallFormat,
    CallReader,
    Tool,
    find_format,
    write_calls,
)
from polymux.core.text.grammar import Grammars, after_thought, write_grammar
from polymux.core.text.guide import GrammarGuide, MaskWriter
from polymux.core.text.parts import PlainReader, Reader, ThoughtReader
from polymux.core.text.tokenizer import Tokenizer

EOS = 1
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
TOOLS = [
    Tool("weather", CITY, strict=False),
    Tool(
        "add", {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": False}, strict=True
    ),
]
CALLS = [("weather", '{"city": "a \\"}{[\\" b"}'), ("add", '{"a": 12}')]

WRITTEN = {
    HERMES: (
        '<tool_call>\n{"name": "weather", "arguments": %s}\n</tool_call>\n'
        '<tool_call>\n{"name": "add", "arguments": %s}\n</tool_call>'
    ),
    LLAMA: '{"name": "weather", "parameters": %s}; {"name": "add", "parameters": %s}',
    MISTRAL: '[TOOL_CALLS][{"name": "weather", "arguments": %s}, {"name": "add", "arguments": %s}]',
    MISTRAL_NAMED: "[TOOL_CALLS]weather[ARGS]%s[TOOL_CALLS]add[ARGS]%s",
    PLAIN: '{"name": "weather", "arguments": %s};{"name": "add", "arguments": %s}',
}
FORMATS = list(WRITTEN)


MARKS = ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>"]


def make_tokenizer(kind: str) -> Tokenizer:
    """Marks as text, as tokens of their own (Qwen), as special ones (Mistral)."""
    backend = tokenizers.byte_level()
    if kind == "tokens":
        backend.add_tokens([AddedToken(mark, normalized=False) for mark in MARKS])
    elif kind == "special":
        backend.add_special_tokens(MARKS)
    return Tokenizer(backend, eos_ids=frozenset({EOS}))


TOKENIZERS = {kind: make_tokenizer(kind) for kind in ("text", "tokens", "special")}
GRAMMARS = {kind: Grammars(tokenizer, tokenizer.size) for kind, tokenizer in TOKENIZERS.items()}


def accepts(grammar: str, text: str, marks: str = "text") -> bool:
    """Whether the text is a whole answer."""
    tokenizer = TOKENIZERS[marks]
    guide = GrammarGuide(GRAMMARS[marks].compile(grammar, "tools").open())
    masks = MaskWriter(tokenizer.size)
    for id in [*tokenizer.encode(text, special=False), EOS]:
        if guide.finished:
            return id == EOS
        bits = np.unpackbits(masks.write([guide]).view(np.uint8), bitorder="little")
        if not bits[id]:
            return False
        guide.take(id)
    return True


def read(reader: Reader, text: str, cuts: list[int]) -> list[tuple[str, str]]:
    """Neighbouring parts of a kind joined; every call is one of its own."""
    told: list[tuple[str, str]] = []
    places = [0, *sorted(cut for cut in cuts if cut < len(text)), len(text)]
    parts = [part for start, end in pairwise(places) for part in reader.push(text[start:end], end)]
    ends = [part.end for part in parts]
    assert ends == sorted(ends)
    for part in [*parts, *reader.flush(len(text))]:
        if told and told[-1][0] == part.kind != "call":
            told[-1] = (part.kind, told[-1][1] + part.text)
        else:
            told.append((part.kind, part.text))
    return told


cuts = st.lists(st.integers(1, 200), max_size=30)
everything = list(range(1, 400))


@pytest.mark.parametrize("marks", TOKENIZERS)
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
class TestGrammar:
    def text(self, format: CallFormat) -> str:
        return WRITTEN[format] % tuple(arguments for _, arguments in CALLS)

    def test_a_forced_answer_calls_tools_and_says_nothing_else(self, format: CallFormat, marks: str) -> None:
        grammar = write_calls(format, TOOLS, TOKENIZERS[marks], forced=True, parallel=True)
        text = self.text(format)
        assert accepts(grammar, text, marks)
        assert not accepts(grammar, "Hello", marks)
        assert not accepts(grammar, "", marks)
        assert not accepts(grammar, text.replace("weather", "whether"), marks)
        assert not accepts(grammar, text.replace("12", '"12"'), marks)
        assert not accepts(grammar, text + " Hello", marks)

    def test_a_free_answer_may_but_then_well(self, format: CallFormat, marks: str) -> None:
        grammar = write_calls(format, TOOLS, TOKENIZERS[marks], forced=False, parallel=True)
        text = self.text(format)
        assert accepts(grammar, "Hello there, 1 < 2!\n", marks)
        assert accepts(grammar, "", marks)
        assert accepts(grammar, text, marks)
        assert not accepts(grammar, text.replace("12", '"12"'), marks)
        if format.begin:
            assert accepts(grammar, "Let me see.\n" + text, marks)

    def test_one_call_where_calls_may_not_be_parallel(self, format: CallFormat, marks: str) -> None:
        grammar = write_calls(format, TOOLS, TOKENIZERS[marks], forced=True, parallel=False)
        assert not accepts(grammar, self.text(format), marks)

    def test_an_answer_beside_tools_keeps_its_format(self, format: CallFormat, marks: str) -> None:
        answer = write_grammar(Format("schema", {"type": "array", "items": {"type": "integer"}}))

        def write(forced: bool) -> str:
            return write_calls(format, TOOLS, TOKENIZERS[marks], forced=forced, parallel=True, answer=answer)

        if not format.begin:
            with pytest.raises(InvalidRequest):
                write(forced=False)
            return
        assert accepts(write(forced=False), self.text(format), marks)
        assert accepts(write(forced=False), "[1, 2]", marks)
        assert not accepts(write(forced=False), "Hello", marks)
        assert not accepts(write(forced=True), "[1, 2]", marks)

    def test_it_may_follow_a_thought(self, format: CallFormat, marks: str) -> None:
        grammar = write_calls(format, TOOLS, TOKENIZERS[marks], forced=True, parallel=True)
        assert accepts(after_thought(grammar), "\n\n" + self.text(format), marks)


def test_keywords_that_cannot_be_kept_are_refused_where_they_must_be() -> None:
    odd = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}

    def compile(strict: bool, forced: bool) -> None:
        grammar = write_calls(HERMES, [Tool("f", odd, strict)], TOKENIZERS["text"], forced=forced, parallel=True)
        GRAMMARS["text"].compile(grammar, "tools")

    compile(strict=False, forced=False)
    for strict, forced in ((True, False), (False, True)):
        with pytest.raises(InvalidRequest) as refusal:
            compile(strict, forced)
        assert refusal.value.param == "tools"


@pytest.mark.parametrize("marks", TOKENIZERS)
def test_a_mark_inside_a_text_is_spelled(marks: str) -> None:
    """A string that a grammar forces is never said with the token of that name."""
    guide = GrammarGuide(GRAMMARS[marks].compile(write_grammar(Format("schema", {"const": "<tool_call>"}))).open())
    said = []
    while not guide.finished:
        bits = np.unpackbits(MaskWriter(TOKENIZERS[marks].size).write([guide]).view(np.uint8), bitorder="little")
        said.append(int(np.flatnonzero(bits)[-1]))
        guide.take(said[-1])
    assert TOKENIZERS[marks].decode(said) == '"<tool_call>"'
    assert not TOKENIZERS[marks].mark_ids & set(said)


def test_a_tool_with_definitions_of_its_own() -> None:
    schema = {
        "type": "object",
        "properties": {"next": {"$ref": "#/$defs/node"}},
        "required": ["next"],
        "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}},
    }
    tools = [Tool("f", schema, True), Tool("g", CITY, True)]
    grammar = write_calls(PLAIN, tools, TOKENIZERS["text"], forced=True, parallel=False)
    assert accepts(grammar, '{"name": "f", "arguments": {"next": {"next": {}}}}')
    assert not accepts(grammar, '{"name": "g", "arguments": {"next": {}}}')


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
class TestReader:
    @given(cuts=cuts)
    def test_calls_come_out_whole(self, format: CallFormat, cuts: list[int]) -> None:
        text = WRITTEN[format] % tuple(arguments for _, arguments in CALLS)
        expected = [part for name, arguments in CALLS for part in (("call", name), ("arguments", arguments))]
        assert read(CallReader(format), text, cuts) == expected
        if format.begin:
            told = read(CallReader(format), "Let me <tool_cal see.\n " + text, cuts)
            assert told == [("text", "Let me <tool_cal see."), *expected]

    @given(cuts=cuts, text=st.sampled_from(["Hello\nthere. ", "", " ", "1 < 2 [TOOL", "<tool_cal", "a {b} <|python"]))
    def test_words_stay_words(self, format: CallFormat, cuts: list[int], text: str) -> None:
        assert "".join(part for kind, part in read(CallReader(format), text, cuts) if kind == "text") == text

    def test_arguments_are_told_as_they_come(self, format: CallFormat) -> None:
        reader, told = CallReader(format), []
        text = WRITTEN[format] % tuple(arguments for _, arguments in CALLS)
        for end in range(1, len(text) + 1):
            told += reader.push(text[end - 1 : end], end)
        assert len([part for part in told if part.kind == "arguments"]) == sum(len(call[1]) for call in CALLS)
        assert reader.called

    def test_a_call_that_was_cut_off_keeps_what_came(self, format: CallFormat) -> None:
        text = WRITTEN[format] % tuple(arguments for _, arguments in CALLS)
        cut = text.index('"city"') + 6
        assert read(CallReader(format), text[:cut], everything) == [("call", "weather"), ("arguments", '{"city"')]


class TestThought:
    @given(cuts=cuts)
    def test_a_thought_is_told_apart(self, cuts: list[int]) -> None:
        def reader(inside: bool) -> Reader:
            return ThoughtReader("<think>", "</think>", PlainReader(), inside=inside)

        both = [("thought", "Well,\n a < b"), ("text", "Yes, </thin\n")]
        assert read(reader(False), "<think>\nWell,\n a < b\n</think>\n\nYes, </thin\n", cuts) == both
        assert read(reader(True), "\nWell,\n a < b\n</think>\n\nYes, </thin\n", cuts) == both
        assert read(reader(False), " Yes <think>", cuts) == [("text", " Yes <think>")]
        assert read(reader(True), "Well, </th", cuts) == [("thought", "Well, </th")]
        assert read(reader(True), "\n</think>\n", cuts) == []
        assert read(reader(False), "<thi", cuts) == [("text", "<thi")]

    def test_calls_after_a_thought(self) -> None:
        reader = ThoughtReader("<think>", "</think>", CallReader(HERMES), inside=True)
        text = 'I could call <tool_call>.</think>\n\n<tool_call>{"name": "f", "arguments": {}}</tool_call>'
        told = [("thought", "I could call <tool_call>."), ("call", "f"), ("arguments", "{}")]
        assert read(reader, text, everything) == told
        assert reader.called


@pytest.mark.parametrize(
    ("template", "format"),
    [
        ("{{ tools }}<tool_call>", HERMES),
        ('{{ tools }}"parameters": <|python_tag|>', LLAMA),
        ("{{ tools }}[TOOL_CALLS]", MISTRAL),
        ("{{ tools }}[TOOL_CALLS][ARGS]", MISTRAL_NAMED),
        ("{{ tools }}", PLAIN),
        ("{{ messages }}", None),
        ("{{ tools }}<tool_call><function=name>", None),
    ],
)
def test_the_format_is_what_the_template_shows(template: str, format: CallFormat | None) -> None:
    assert find_format(template) is format


def test_parameters_are_an_object() -> None:
    def read_tool(parameters: Any) -> Tool:
        return Tool.read({"type": "function", "function": {"name": "f", "parameters": parameters}})

    assert read_tool({"properties": {}}).schema == {"type": "object", "properties": {}}
    assert json.loads(json.dumps(read_tool(None).schema))["type"] == "object"
    with pytest.raises(InvalidRequest):
        read_tool({"type": "string"})
