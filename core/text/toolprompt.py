"""Tools for models whose chat template knows none: shown in words, called and answered as in Hermes' format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polymux.core.text.template import join_parts

INTRODUCTION = """You can call functions. Each is described by a JSON object:
{tools}
To call one, answer with nothing but
<tool_call>
{{"name": "the function's name", "arguments": {{...}}}}
</tool_call>
Its result comes back in a <tool_response>. Without need for a function, answer in words."""


def introduce(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] | None) -> list[dict[str, Any]]:
    """The conversation for a template that knows only words: tools in the system message, calls and results as text."""
    told = [_spell(message) for message in messages]
    if not tools:
        return told
    words = INTRODUCTION.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told and told[0].get("role") in ("system", "developer"):
        first = told[0]
        content = first["content"]
        text = join_parts(content, "messages[0].content") if isinstance(content, list) else content
        return [{**first, "content": f"{text}\n\n{words}"}, *told[1:]]
    return [{"role": "system", "content": words}, *told]


def _spell(message: dict[str, Any]) -> dict[str, Any]:
    if message.get("role") == "tool":
        content = message.get("content") or ""
        if isinstance(content, list):
            marks = ({"type": "text", "text": text} for text in ("<tool_response>\n", "\n</tool_response>"))
            return {"role": "user", "content": [next(marks), *content, next(marks)]}
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = message.get("tool_calls")
    if not calls:
        return message
    spelled = [f"<tool_call>\n{_write(call['function'])}\n</tool_call>" for call in calls]
    rest = {key: value for key, value in message.items() if key != "tool_calls"}
    words = [message["content"]] if message.get("content") else []
    return {**rest, "content": "\n".join([*words, *spelled])}


def _write(function: dict[str, Any]) -> str:
    """A call as the model would have written it: the arguments are JSON already."""
    arguments = function["arguments"] or "{}"
    return f'{{"name": {json.dumps(function["name"])}, "arguments": {arguments}}}'
