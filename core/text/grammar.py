"""Grammars: what an answer must look like, compiled by llguidance against a model's own tokens.

A grammar travels as text (llguidance's own JSON form), so the half that checks a request and the half that runs it
compile the same thing. Work is bounded by counting, so that a schema that is too large is refused alike on an idle
machine and on a busy one; a clock bounds what counting did not foresee.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import llguidance

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Format
from polymux.core.text.tokenizer import Tokenizer

MAX_CHARACTERS = 200_000
"""Characters of one grammar's text."""

MAX_DEPTH = 64
"""Objects and arrays inside each other in a schema."""

KEPT = 64
"""Compiled grammars that are kept for the next request that needs the same one."""

PATIENCE = 20.0
"""Seconds that a caller waits for a grammar to be compiled."""

WHITESPACE = r"[\x20\x0A\x0D\x09]{0,32}"
"""Between the parts of a JSON text: as models write it, but never without end."""

LIMITS = llguidance.LLParserLimits(max_grammar_size=100_000, verbose_errors=False)


class Grammar:
    """A compiled grammar. Opening it is cheap; every answer needs a matcher of its own."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    def open(self) -> llguidance.LLMatcher:
        """A matcher that has read nothing yet."""
        return self._matcher.deep_copy()


class Grammars:
    """Compiles grammars for one tokenizer and keeps the latest. `vocabulary` is the width of the model's logits.

    Safe to share between threads.
    """

    def __init__(self, tokenizer: Tokenizer, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._tokens: llguidance.LLTokenizer | None = None
        self._kept: OrderedDict[str, Grammar] = OrderedDict()
        self._running: dict[str, Future[Grammar | str]] = {}
        self._lock = threading.Lock()

    def find(self, text: str) -> Grammar | None:
        """The grammar, if it was compiled before."""
        with self._lock:
            grammar = self._kept.get(text)
            if grammar is not None:
                self._kept.move_to_end(text)
            return grammar

    def compile(self, text: str, param: str = "response_format") -> Grammar:
        """Raises `InvalidRequest` for what is no grammar, is not supported, takes too long or allows no answer.

        `param` is the field of the request that it came in.
        """
        grammar = self.find(text)
        if grammar is not None:
            return grammar
        if len(text) > MAX_CHARACTERS:
            raise _refuse(f"it is longer than {MAX_CHARACTERS} characters", param)
        with self._lock:
            running = self._running.get(text)
            if running is None:
                running = self._running[text] = Future()
                # nothing interrupts the library: what takes too long ends on a thread that nobody waits for
                threading.Thread(target=self._build, args=(text, running), name="grammar", daemon=True).start()
        try:
            complaint = running.result(PATIENCE)
        except TimeoutError:
            raise _refuse(f"it takes more than {PATIENCE:g} seconds to compile", param) from None
        if isinstance(complaint, str):
            raise _refuse(complaint, param)
        return complaint

    def _build(self, text: str, running: Future[Grammar | str]) -> None:
        """The grammar, or why there is none."""
        try:
            matcher = llguidance.LLMatcher(self._load_tokens(), text, log_level=0, limits=LIMITS)
            complaint = matcher.get_error()
            if not complaint:
                allowed = matcher.compute_bitmask()
                complaint = matcher.get_error() or ("" if any(allowed) and _begins(matcher) else "it allows no answer")
            built: Grammar | str = complaint or Grammar(matcher)
        except BaseException as error:
            with self._lock:
                del self._running[text]
            running.set_exception(error)
            return
        with self._lock:
            del self._running[text]
            if isinstance(built, Grammar):
                self._kept[text] = built
                while len(self._kept) > KEPT:
                    self._kept.popitem(last=False)
        running.set_result(built)

    def _load_tokens(self) -> llguidance.LLTokenizer:
        with self._lock:
            if self._tokens is None:
                self._tokens = llguidance.LLTokenizer(
                    hide_marks(self._tokenizer),
                    n_vocab=max(self._vocabulary, self._tokenizer.size),
                    eos_token=sorted(self._tokenizer.eos_ids) or None,
                )
            return self._tokens


def hide_marks(tokenizer: Tokenizer) -> str:
    """The tokenizer's definition with its marks renamed to what no text contains.

    A grammar's text would else be spelled with them: a string "<tool_call>" is not the token of that name.
    """
    definition = json.loads(tokenizer.definition)
    definition["post_processor"] = None
    vocabulary = definition["model"].get("vocab")
    for token in definition["added_tokens"]:
        if token["id"] not in tokenizer.mark_ids:
            continue
        old, token["content"] = token["content"], f"<|\0{token['id']}\0|>"
        if isinstance(vocabulary, dict) and old in vocabulary:
            vocabulary[token["content"]] = vocabulary.pop(old)
        elif isinstance(vocabulary, list) and token["id"] < len(vocabulary):
            vocabulary[token["id"]][0] = token["content"]
    return json.dumps(definition)


def write_grammar(format: Format) -> str:
    """The grammar of a format that a user asked for. Raises `InvalidRequest` for what cannot be one."""
    return WRITERS[format.kind](format.value)


def write_schema(schema: Any) -> str:
    """The grammar of JSON texts that a schema accepts. Raises `InvalidRequest` for what is nested beyond all sense."""
    if not isinstance(schema, dict | bool):
        raise _refuse("a schema is an object or a boolean")
    _check_depth(schema)
    return json.dumps({"grammars": [{"json_schema": _with_options(schema)}]})


def write_regex(pattern: str) -> str:
    """The grammar of texts that a regular expression matches as a whole."""
    return llguidance.LLMatcher.grammar_from_regex(pattern)


def write_choice(choices: Sequence[str]) -> str:
    """The grammar of a few texts."""
    return pack_lark("start: " + " | ".join(map(json.dumps, choices)))


def write_lark(text: str) -> str:
    """A grammar written in llguidance's variant of Lark, or in GBNF."""
    try:
        return pack_lark(llguidance.grammar_from("grammar", text))
    except ValueError as error:
        raise _refuse(str(error)) from error


WRITERS: dict[str, Callable[[Any], str]] = {
    "schema": write_schema,
    "regex": write_regex,
    "choice": write_choice,
    "grammar": write_lark,
}
"""Kinds of a `Format`."""


def embed_schema(schema: Any, *, lenient: bool = False) -> str:
    """The schema as a rule's body inside a Lark grammar. `lenient`: keywords that cannot be kept are passed over."""
    _check_depth(schema)
    return "%json " + json.dumps(_with_options(schema, lenient=lenient))


def after_thought(grammar: str) -> str:
    """The grammar of an answer that follows a thought: models put empty lines between the two."""
    grammars = json.loads(grammar)["grammars"]
    answer = {**grammars[0], "name": "after_thought"}
    return json.dumps({"grammars": [{"lark_grammar": "start: /\\n{0,2}/ @after_thought"}, answer, *grammars[1:]]})


def pack_lark(text: str) -> str:
    """A grammar in llguidance's variant of Lark, ready to be compiled."""
    return json.dumps({"grammars": [{"lark_grammar": text}]})


def _with_options(schema: dict[str, Any] | bool, *, lenient: bool = False) -> dict[str, Any] | bool:
    if isinstance(schema, bool):
        return schema
    if "x-guidance" in schema:
        raise _refuse("x-guidance is not available")
    return {**schema, "x-guidance": {"whitespace_pattern": WHITESPACE, "lenient": lenient}}


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not inner:
            return
        level = inner
    raise _refuse(f"it is nested deeper than {MAX_DEPTH} levels")


def _begins(matcher: llguidance.LLMatcher) -> bool:
    """Whether anything can be said at all: a schema that only refers to itself can never begin."""
    return not matcher.is_stopped() or matcher.is_accepting()


def _refuse(reason: str, param: str = "response_format") -> InvalidRequest:
    return InvalidRequest(f"This format cannot be guaranteed: {reason.strip()}", param=param)
