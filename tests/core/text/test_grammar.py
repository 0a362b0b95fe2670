"""Formats are compiled or refused with a reason, in bounded time, and a mask allows only what can still end well."""

from __future__ import annotations

import threading
import time
from typing import Any

import llguidance
import numpy as np
import pytest

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Format
from polymux.core.testing import tokenizers
from polymux.core.text.grammar import MAX_DEPTH, Grammars, after_thought, write_grammar, write_schema
from polymux.core.text.guide import GrammarGuide, Guide, MaskWriter, ThoughtGuide
from polymux.core.text.tokenizer import Tokenizer

VOCABULARY = 420
EOS = 1
"""</s> of the test tokenizer."""


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(tokenizers.byte_level(), eos_ids=frozenset({EOS}))


@pytest.fixture(scope="module")
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer, VOCABULARY)


def allowed(guide: Guide) -> set[int]:
    bits = np.unpackbits(MaskWriter(VOCABULARY).write([guide]).view(np.uint8), bitorder="little")
    return set(np.flatnonzero(bits[:VOCABULARY]))


def say(guide: Guide, ids: list[int]) -> bool:
    """Whether the guide would have let every token through."""
    for id in ids:
        if id not in allowed(guide):
            return False
        guide.take(id)
    return True


@pytest.mark.parametrize(
    ("format", "good", "bad"),
    [
        (Format("schema", {"type": "object", "properties": {"a": {"type": "integer"}}}), '{"a": 12}', '{"a": "x"}'),
        (Format("schema", {"enum": ["red", "green"]}), '"green"', '"blue"'),
        (Format("regex", "[a-c]{2}[0-9]+"), "ab12", "ad1"),
        (Format("choice", ["yes", 'no "way"\n']), 'no "way"\n', "noway"),
        (Format("grammar", 'start: "a" b\nb: "b"+'), "abb", "aab"),
        (Format("grammar", 'root ::= "x" y*\ny ::= [0-9]'), "x12", "xy"),
    ],
)
def test_every_kind_lets_through_what_it_should(
    tokenizer: Tokenizer, grammars: Grammars, format: Format, good: str, bad: str
) -> None:
    grammar = grammars.compile(write_grammar(format))
    guide = GrammarGuide(grammar.open())
    assert say(guide, tokenizer.encode(good, special=False))
    assert EOS in allowed(guide)
    guide.take(EOS)
    assert guide.finished
    assert not say(GrammarGuide(grammar.open()), [*tokenizer.encode(bad, special=False), EOS])


def test_an_answer_that_cannot_go_on_is_finished_without_a_stop_token(tokenizer: Tokenizer, grammars: Grammars) -> None:
    guide = GrammarGuide(grammars.compile(write_grammar(Format("choice", ["yes"]))).open())
    assert say(guide, tokenizer.encode("yes", special=False))
    assert guide.finished


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"properties": {"a": schema}}
    return schema


REFUSED: dict[str, Format] = {
    "keyword": Format("schema", {"not": {"type": "string"}}),
    "conditional": Format("schema", {"if": {"type": "string"}, "then": {"maxLength": 3}}),
    "unique items": Format("schema", {"type": "array", "uniqueItems": True}),
    "type": Format("schema", {"type": "text"}),
    "string format": Format("schema", {"type": "string", "format": "poem"}),
    "nothing": Format("schema", False),
    "empty enum": Format("schema", {"enum": []}),
    "contradiction": Format("schema", {"type": "integer", "minimum": 5, "maximum": 1}),
    "endless reference": Format("schema", {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}),
    "remote reference": Format("schema", {"$ref": "http://example.com/schema"}),
    "depth": Format("schema", nested(MAX_DEPTH)),
    "huge enum": Format("schema", {"enum": [f"x{i}" for i in range(100_000)]}),
    "huge object": Format("schema", {"properties": {f"p{i}": {"type": "string"} for i in range(20_000)}}),
    "explosion": Format(
        "schema",
        {"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {"const": j}}} for j in range(9)]} for i in range(9)]},
    ),
    "options of the library": Format("schema", {"type": "object", "x-guidance": {"lenient": True}}),
    "no schema": Format("schema", "a text"),
    "regex": Format("regex", "(a"),
    "look-ahead": Format("regex", "a(?!b)"),
    "grammar": Format("grammar", "start: missing"),
    "empty grammar": Format("grammar", ""),
}


@pytest.mark.parametrize("format", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_guaranteed_is_refused_in_bounded_time(grammars: Grammars, format: Format) -> None:
    begin = time.thread_time()
    with pytest.raises(InvalidRequest) as refusal:
        grammars.compile(write_grammar(format))
    assert refusal.value.param == "response_format"
    assert time.thread_time() - begin < 5


def test_what_is_large_but_sensible_is_compiled(grammars: Grammars) -> None:
    grammars.compile(write_schema({"enum": [f"item {i}" for i in range(1000)]}))
    grammars.compile(write_schema({"properties": {f"p{i}": {"type": "string"} for i in range(200)}}))


def test_a_grammar_is_compiled_once(grammars: Grammars) -> None:
    text = write_schema({"type": "integer"})
    assert grammars.compile(text) is grammars.compile(text) is grammars.find(text)


class TestThought:
    """A thought is free, bounded, and closed before the answer's format begins."""

    BEGIN, END = 2, 3

    def guide(self, grammars: Grammars, *, inside: bool = False, budget: int | None = None) -> ThoughtGuide:
        grammar = grammars.compile(after_thought(write_grammar(Format("choice", ["yes"]))))
        answer = GrammarGuide(grammar.open())
        return ThoughtGuide(self.BEGIN, self.END, answer, inside=inside, budget=budget, stops=[EOS])

    def test_the_format_speaks_of_the_answer_only(self, tokenizer: Tokenizer, grammars: Grammars) -> None:
        thought = tokenizer.encode("no! maybe?", special=False)
        answer = tokenizer.encode("\n\nyes", special=False)
        guide = self.guide(grammars)
        assert say(guide, [self.BEGIN, *thought, self.END, *answer])
        assert guide.finished
        assert say(self.guide(grammars), tokenizer.encode("yes", special=False)), "a thought is not an obligation"
        assert not say(self.guide(grammars), thought)
        assert say(self.guide(grammars, inside=True), [*thought, self.END, *answer])

    def test_a_stop_token_cannot_take_the_answers_place(self, grammars: Grammars) -> None:
        assert not say(self.guide(grammars, inside=True), [EOS])

    def test_the_budget_closes_it(self, grammars: Grammars) -> None:
        guide = self.guide(grammars, inside=True, budget=2)
        assert say(guide, [50, 51])
        assert allowed(guide) == {self.END}
        assert allowed(self.guide(grammars, inside=True, budget=0)) == {self.END}
        assert self.BEGIN not in allowed(self.guide(grammars, budget=0))

    def test_without_a_format_only_the_budget_speaks(self) -> None:
        guide = ThoughtGuide(self.BEGIN, self.END, inside=True, budget=1)
        assert len(allowed(guide)) == VOCABULARY
        guide.take(50)
        assert allowed(guide) == {self.END}
        guide.take(self.END)
        assert len(allowed(guide)) == VOCABULARY
        assert not guide.finished


def test_a_grammar_that_takes_too_long_is_refused_and_compiled_once(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller gets its answer when the time is over; the work ends by itself, and whoever asks then is served."""
    free, begun = threading.Event(), []
    compile_really = llguidance.LLMatcher

    def compile_slowly(*arguments: Any, **options: Any) -> Any:
        begun.append(arguments)
        free.wait()
        return compile_really(*arguments, **options)

    monkeypatch.setattr("polymux.core.text.grammar.llguidance.LLMatcher", compile_slowly)
    monkeypatch.setattr("polymux.core.text.grammar.PATIENCE", 0.05)
    grammars = Grammars(tokenizer, VOCABULARY)
    text = '{"grammars": [{"json_schema": {"type": "integer"}}]}'
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="seconds to compile") as refusal:
            grammars.compile(text, "tools")
        assert refusal.value.param == "tools"
    free.set()
    monkeypatch.setattr("polymux.core.text.grammar.PATIENCE", 60.0)
    assert grammars.compile(text) is grammars.find(text)
    assert len(begun) == 1
