"""The jinja2 sandbox that chat templates run in: the environment their authors expect, bounded in work and size.

A template comes with a model, so it can be wrong or hostile, and Python cannot stop a running thread. Every loop
iteration and call therefore counts against a budget, and every operation that can make a text or list grow is
checked. The budget is counted in steps, not seconds: a busy machine refuses nothing that an idle one accepts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 200_000
"""Loop iterations and calls of one rendering, about a second of work."""

MAX_CHARACTERS = 16_000_000
"""Characters of a rendering, and of any text on the way to it."""

steps_left: ContextVar[int] = ContextVar("steps_left")


class Exhausted(Exception):
    """A rendering used up its steps or grew beyond all sense."""


class GenerationTag(Extension):
    """{% generation %}...{% endgeneration %} marks the assistant's words for training; here it is transparent."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class Namespace(jinja2.utils.Namespace):
    """`namespace()` without private attributes."""

    def __setitem__(self, name: str, value: Any) -> None:
        if name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"{name!r} is no name for a namespace's attribute")
        super().__setitem__(name, value)


class Metering(NodeTransformer):
    """Rewrites a template: each loop iteration takes a step, and `~` is checked like the other operators."""

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        step = nodes.Filter(nodes.Const(None), "take_step", [], [], None, None, lineno=node.lineno)
        node.body.insert(0, nodes.ExprStmt(step, lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        return nodes.Filter(parts, "join", [], [], None, None, lineno=node.lineno)


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment of chat templates: blocks trimmed, loop controls, `tojson` as plain JSON, `raise_exception`,
    `strftime_now`."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag])
        self.filters.update(
            take_step=take_step, tojson=write_json, replace=replace, join=join, indent=indent, format=format_text
        )
        for name in ("center", "wordwrap", "xmlattr", "urlize", "pprint"):
            del self.filters[name]  # padding or rewriting without measure, and made for web pages
        for name in ("lipsum", "cycler", "joiner"):
            del self.globals[name]
        self.globals.update(raise_exception=refuse, strftime_now=format_now, namespace=Namespace)

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return Metering().visit(super()._parse(source, name, filename))

    def call(self, context: Any, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        take_step()
        method = getattr(target, "__wrapped__", target)  # jinja2 wraps str.format in its own
        text, verb = getattr(method, "__self__", None), getattr(method, "__name__", None)
        if isinstance(text, str):
            if verb in UNMEASURED:
                raise jinja2.exceptions.SecurityError(f"{verb}() is not available to chat templates")
            if verb == "format":
                check_pattern(text, BRACES)
            elif verb == "replace":
                check_replacement(text, *args[:2])
            elif verb == "join":
                args = (check_texts(text, *args),)
        return checked(super().call(context, target, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for many, times in ((left, right), (right, left)):
                if isinstance(many, str | list | tuple) and isinstance(times, int):
                    check_size(len(many) * max(times, 0))
        elif operator == "%" and isinstance(left, str):
            check_pattern(left, PRINTF)
        elif operator == "**":
            raise jinja2.exceptions.SecurityError("** is not available to chat templates")
        return checked(super().call_binop(context, operator, left, right))


@jinja2.pass_context
def take_step(*_: Any) -> None:
    left = steps_left.get() - 1
    if left < 0:
        raise Exhausted(f"more than {MAX_STEPS} steps")
    steps_left.set(left)


@jinja2.pass_eval_context
def join(_: Any, values: Iterable[Any], between: str = "", attribute: str | None = None) -> str:
    """The filter `join`."""
    if attribute is not None:
        values = [value[attribute] for value in values]
    return between.join(check_texts(between, values))


def replace(text: str, old: str, new: str, count: int = -1) -> str:
    """The filter `replace`."""
    text = str(text)
    check_replacement(text, old, new)
    return text.replace(old, new, count)


def indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """The filter `indent`."""
    check_size(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else len(width)))
    return do_indent(text, width, first, blank)


def check_texts(between: str, values: Iterable[Any]) -> list[str]:
    """The values as texts that may be joined."""
    texts = [str(value) for value in values]
    check_size(sum(map(len, texts)) + len(between) * len(texts))
    return texts


def check_replacement(text: str, old: str, new: str) -> None:
    check_size(len(text) + text.count(old) * len(new))


def check_pattern(pattern: str, wide: re.Pattern[str]) -> str:
    """A format pattern as it is. Raises `SecurityError` when it could pad without bound."""
    if wide.search(str(pattern)):
        raise jinja2.exceptions.SecurityError("this format pattern pads too far")
    return pattern


@jinja2.pass_environment
def format_text(_: Any, pattern: str, *args: Any, **kwargs: Any) -> str:
    """The filter `format`, printf style."""
    return check_pattern(pattern, PRINTF) % (kwargs or args)


def write_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it stands in the model's training text: neither ASCII-escaped nor HTML-escaped."""
    if isinstance(indent, int) and indent > 16:
        raise jinja2.exceptions.SecurityError("JSON for a model is indented by 16 at most")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


PRINTF = re.compile(r"%[^a-zA-Z%]*(\d{4}|\*)")
BRACES = re.compile(r"\{[^{}]*:[^{}]*(\d{4}|\{)")
"""A width of a thousand or more, or one that is an argument, in either notation."""

UNMEASURED = ("center", "expandtabs", "format_map", "ljust", "rjust", "translate", "zfill")
"""Methods that let a text grow out of proportion, and that no template needs."""


def limited(pieces: Iterable[str]) -> str:
    """The rendering whose pieces these are. Raises `Exhausted` when it takes too many steps or characters."""
    token = steps_left.set(MAX_STEPS)
    try:
        whole, size = [], 0
        for piece in pieces:
            size += len(piece)
            check_size(size)
            whole.append(piece)
        return "".join(whole)
    finally:
        steps_left.reset(token)


def checked(value: Any) -> Any:
    if isinstance(value, str | list | tuple):
        check_size(len(value))
    return value


def check_size(size: int) -> None:
    if size > MAX_CHARACTERS:
        raise Exhausted(f"more than {MAX_CHARACTERS} characters")


def refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def format_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
