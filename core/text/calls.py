"""How models write calls of tools: each format as data, from which its grammar is written and its text is read.

The formats are told apart by the model's chat template, which shows the model's own past calls in the same form.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from polymux.core.errors import InvalidRequest
from polymux.core.text.grammar import embed_schema
from polymux.core.text.parts import Part, Reader, split_at
from polymux.core.text.tokenizer import Tokenizer

MAX_TOOLS = 128

SPACE = "/[ \\n\\r\\t]{0,32}/"


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `strict`: its arguments are guaranteed or it is refused."""

    name: str
    schema: dict[str, Any]
    strict: bool

    @classmethod
    def read(cls, tool: dict[str, Any]) -> Tool:
        function = tool["function"]
        schema = function.get("parameters") or {"properties": {}, "additionalProperties": False}
        if schema.get("type", "object") != "object":
            raise InvalidRequest(f"The parameters of {function['name']} must be of type object.", param="tools")
        return cls(function["name"], {"type": "object", **schema}, bool(function.get("strict")))


@dataclass(frozen=True)
class CallFormat:
    """One way to write calls.

    `layout`: "object", a JSON object with a name and arguments; "array", a JSON array of such; "named", the name, then
    `middle`, then the arguments. `begin` and `end` surround a call ("array": all of them); without `begin`, an answer
    that starts with a brace is a call.
    """

    name: str
    layout: Literal["object", "array", "named"]
    begin: str = ""
    end: str = ""
    middle: str = ""
    key: str = "arguments"
    separator: str = ""
    prefix: str = ""
    """May come before the first call of a format without `begin`."""
    id_length: int | None = None
    """Letters of a call's id, where templates insist on a number."""
    sign: str = ""
    """Templates with this in them show calls so (formats that plugins bring)."""

    @property
    def marks(self) -> list[str]:
        """Special tokens whose text the reader must see."""
        return [mark for mark in (self.begin, self.end, self.middle, self.prefix) if mark]

    def shown_by(self, template: str) -> bool:
        """Whether a chat template writes calls so."""
        return bool(self.sign) and self.sign in template

    def write(
        self,
        tools: Sequence[Tool],
        tokenizer: Tokenizer,
        *,
        forced: bool,
        parallel: bool,
        answer: str | None = None,
    ) -> str:
        """The grammar of an answer that calls tools: it must where `forced`, else it may also be any text, or a
        sentence of the grammar `answer`; several times where `parallel`.

        Raises `InvalidRequest` for a schema that cannot be kept although it must.
        """
        return write_calls(self, tools, tokenizer, forced=forced, parallel=parallel, answer=answer)

    def open_reader(self) -> Reader:
        """Reads one answer as it comes: words, and calls with their arguments."""
        return CallReader(self)


HERMES = CallFormat("hermes", "object", begin="<tool_call>", end="</tool_call>")
LLAMA = CallFormat("llama3", "object", key="parameters", separator=";", prefix="<|python_tag|>")
MISTRAL = CallFormat("mistral", "array", begin="[TOOL_CALLS]", id_length=9)
MISTRAL_NAMED = CallFormat("mistral-named", "named", begin="[TOOL_CALLS]", middle="[ARGS]", id_length=9)
PLAIN = CallFormat("json", "object", separator=";")


def find_format(template: str, formats: Iterable[CallFormat] = ()) -> CallFormat | None:
    """The format of a chat template's calls; None when it shows no tools, or calls in a form that is not known here.

    `formats` are asked before core's own.
    """
    for format in formats:
        if format.shown_by(template):
            return format
    if "<function=" in template or "<arg_key>" in template or "<|channel|>" in template:
        return None
    if "<tool_call>" in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return MISTRAL_NAMED if "[ARGS]" in template else MISTRAL
    if "tools" not in template:
        return None
    return LLAMA if "<|python_tag|>" in template or '"parameters": ' in template else PLAIN


def write_calls(
    format: CallFormat,
    tools: Sequence[Tool],
    tokenizer: Tokenizer,
    *,
    forced: bool,
    parallel: bool,
    answer: str | None = None,
) -> str:
    """What `CallFormat.write` says, for the layouts that are data."""
    lines = [f"call: {' | '.join(f'call_{i}' for i in range(len(tools)))}"]
    for i, tool in enumerate(tools):
        schema = embed_schema(tool.schema, lenient=not (forced or tool.strict))
        lines += [
            f"call_{i}: {_write_call(format, tool.name, tokenizer)} args_{i}{_close(format)}",
            f"args_{i}: {schema}",
        ]
    begin, end, again = (_mark(mark, tokenizer) for mark in (format.begin, format.end, format.separator))
    if format.layout == "array":
        more = f'({SPACE} "," {SPACE} call)*' if parallel else ""
        calls, tail = f'{SPACE} "[" {SPACE} call {more} {SPACE} "]"', ""
    else:
        calls = f"{SPACE} call {SPACE} {end}" if format.layout == "object" else f"call {end}"
        tail = f"({SPACE} {again or begin} {calls})*" if parallel else ""
    others = "@answer" if answer is not None else "TEXT?"
    if forced:
        lines.insert(0, f"start: {_prefix(format, tokenizer)} {begin} {calls} {tail}")
    elif not format.begin:
        if answer is not None:
            raise InvalidRequest(
                "This model writes calls like plain JSON: it takes tools or a response_format, not both.",
                param="response_format",
            )
        lines.insert(0, f"start: {others} | {_prefix(format, tokenizer)} {calls} {tail}")
        lines.append("TEXT: /[^{](.|\\n)*/")
    elif answer is not None:
        lines.insert(0, f"start: {others} | {SPACE} {begin} {calls} {tail}")
    else:
        lines.insert(0, f"start: {others} | head {calls} {tail}")
        special = _is_special(format.begin, tokenizer)
        lines += [f"head{'' if special else '[lazy]'}: TEXT {begin}", "TEXT: /(.|\\n)*/"]
    grammars: list[dict[str, Any]] = [{"lark_grammar": "\n".join(lines)}]
    if answer is not None and not forced:
        first, *rest = json.loads(answer)["grammars"]
        grammars += [{**first, "name": "answer"}, *rest]
    return json.dumps({"grammars": grammars})


def _write_call(format: CallFormat, name: str, tokenizer: Tokenizer) -> str:
    if format.layout == "named":
        return f"{json.dumps(name)} {_mark(format.middle, tokenizer)}"
    parts = ["{", '"name"', ":", json.dumps(name), ",", f'"{format.key}"', ":"]
    return f" {SPACE} ".join(map(json.dumps, parts)) + f" {SPACE}"


def _close(format: CallFormat) -> str:
    return "" if format.layout == "named" else f' {SPACE} "}}"'


def _prefix(format: CallFormat, tokenizer: Tokenizer) -> str:
    known = format.prefix and tokenizer.find(format.prefix) is not None
    return f"({_mark(format.prefix, tokenizer)})?" if known else ""


def _mark(mark: str, tokenizer: Tokenizer) -> str:
    """A mark as grammars know it: what is one token of its own is no text to them."""
    if not mark:
        return ""
    return f"<[{tokenizer.find(mark)}]>" if _is_special(mark, tokenizer) else json.dumps(mark)


def _is_special(mark: str, tokenizer: Tokenizer) -> bool:
    return tokenizer.find(mark) in tokenizer.mark_ids


class CallReader(Reader):
    """Reads an answer that may call tools in one format."""

    def __init__(self, format: CallFormat) -> None:
        self._format = format
        self._buffer = ""
        self._state: Literal["start", "text", "header", "arguments", "tail"] = "text" if format.begin else "start"
        self._header, self._tail = _patterns(format)
        self._span = ObjectSpan()

    @property
    def held(self) -> int:
        return len(self._buffer)

    def push(self, text: str, end: int) -> list[Part]:
        self._buffer += text
        parts: list[Part] = []
        while (step := self._step(end)) is not None:
            parts += step
        return parts

    def flush(self, end: int) -> list[Part]:
        text, self._buffer = self._buffer, ""
        if self.called:
            return []
        if self._state == "header":
            if self._format.begin and self._begins_call(text):
                return []  # cut off before its name: there is nothing to tell of it
            text = self._format.begin + text
        return [Part("text", text, end)] if text else []

    def _begins_call(self, text: str) -> bool:
        """Whether a call could go on from here; if not, the mark was a word like any other."""
        head = text.lstrip()
        return self._format.layout == "named" or not head or head[0] in "{["

    def _step(self, end: int) -> list[Part] | None:
        """What the buffer tells next; None when it must grow first."""
        if self._state == "start":
            return self._start()
        if self._state == "text":
            return self._read_text(end)
        if self._state == "header":
            match = self._header.match(self._buffer)
            if match is None:
                return None
            self._state, self.called, self._span = "arguments", True, ObjectSpan()
            self._buffer = self._buffer[match.end() :]
            name = match[1] if self._format.layout == "named" else json.loads(f'"{match[1]}"')
            return [Part("call", name, end - len(self._buffer))]
        if self._state == "arguments":
            if not self._buffer:
                return None
            length = self._span.measure(self._buffer)
            told, self._buffer = self._buffer[:length], self._buffer[length:]
            if self._span.over:
                self._state = "tail"
            return [Part("arguments", told, end - len(self._buffer))]
        match = self._tail.match(self._buffer)
        if match is None:
            return None
        self._buffer = self._buffer[match.end() :]
        self._state = "text" if self._format.begin and self._format.layout != "array" else "header"
        return []

    def _start(self) -> list[Part] | None:
        head = self._buffer.lstrip()
        prefix = self._format.prefix
        if prefix and head.startswith(prefix):
            self._buffer, self._state = head[len(prefix) :], "header"
            return []
        if not head or (prefix and prefix.startswith(head)):
            return None
        self._state = "header" if head.startswith("{") else "text"
        return []

    def _read_text(self, end: int) -> list[Part] | None:
        """White space before a call is told to nobody, so it is held until words follow."""
        if self._format.begin:
            before, after = split_at(self._buffer, self._format.begin)
        else:
            before, after = self._buffer, None
        told = before.rstrip()
        if after is not None:
            self._state = "header"
        elif not told:
            return None
        self._buffer = self._buffer[len(told) :] if after is None else after
        place = end - len(self._buffer)
        return [Part("text", told, place)] if told and not self.called else []


class ObjectSpan:
    """Finds the end of a JSON object in a text that grows."""

    def __init__(self) -> None:
        self.over = False
        self._depth = 0
        self._quoted = False
        self._escaped = False

    def measure(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for place, character in enumerate(text):
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped = character == "\\"
                self._quoted = character != '"'
            elif character == '"':
                self._quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if not self._depth:
                    self.over = True
                    return place + 1
        return len(text)


def _patterns(format: CallFormat) -> tuple[re.Pattern[str], re.Pattern[str]]:
    """What comes before a call's arguments, the name as its group, and what comes after them."""
    if format.layout == "named":
        return re.compile(rf"\s*(.+?){re.escape(format.middle)}\s*(?=\{{)"), re.compile("")
    name = r'"((?:[^"\\]|\\.)*)"'
    opening = r"\s*[\[,;]?\s*" if format.layout == "array" or format.separator else r"\s*"
    header = rf'{opening}\{{\s*"name"\s*:\s*{name}\s*,\s*"{format.key}"\s*:\s*(?=\{{)'
    return re.compile(header), re.compile(rf"\s*\}}\s*{re.escape(format.end)}")
