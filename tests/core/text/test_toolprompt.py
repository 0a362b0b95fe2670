"""A conversation with tools becomes words for a template that knows none."""

from __future__ import annotations

from typing import Any

from polymux.core.text.calls import HERMES, CallReader
from polymux.core.text.toolprompt import introduce

TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
USER = {"role": "user", "content": "Hi"}


def test_tools_are_shown_in_the_system_message() -> None:
    told = introduce([USER], [TOOL])
    assert [message["role"] for message in told] == ["system", "user"]
    assert '"weather"' in told[0]["content"]
    for content in ("Be brief.", [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]):
        told = introduce([{"role": "system", "content": content}, USER], [TOOL])
        assert told[0]["content"].startswith("Be brief.\n\n") and len(told) == 2


def test_without_tools_only_old_calls_are_spelled() -> None:
    assert introduce([USER], None) == [USER]


def test_past_calls_read_as_the_model_would_have_written_them() -> None:
    call: dict[str, Any] = {
        "id": "1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "X"}'},
    }
    messages = [
        USER,
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "rain"},
    ]
    told = introduce(messages, None)
    assert [message["role"] for message in told] == ["user", "assistant", "user"]
    text = told[1]["content"]
    parts = CallReader(HERMES).push(text, len(text))
    assert [(part.kind, part.text) for part in parts] == [
        ("text", "I look."),
        ("call", "weather"),
        ("arguments", '{"city": "X"}'),
    ]
    assert "rain" in told[2]["content"]
