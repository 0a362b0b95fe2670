"""The official Anthropic client against a tiny model: blocks and events, whole and streamed alike."""

from __future__ import annotations

from typing import Any

import httpx2
import jsonschema
import pytest
from anthropic import AsyncAnthropic, BadRequestError, NotFoundError

from polymux.core.tasks import Done
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.routes.messages import GrowingMessage
from polymux.gateway.schemas.messages import MessageRequest

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOL: Any = {"name": "weather", "description": "How it is", "input_schema": PLACE}


def open_client(http: Any) -> AsyncAnthropic:
    return AsyncAnthropic(api_key="none", base_url="http://tiny", http_client=http, max_retries=0)


async def ask_twice(http: Any, **options: Any) -> Any:
    """The whole message, checked against its stream as the client puts it together."""
    client = open_client(http)
    extra = {"seed": 7, **options.pop("extra_body", {})}
    options = {"model": "tiny", "messages": HELLO, "max_tokens": 100, "extra_body": extra, **options}
    whole = await client.messages.create(**options)
    async with client.messages.stream(**options) as stream:
        streamed = await stream.get_final_message()
    assert [strip(block) for block in streamed.content] == [strip(block) for block in whole.content]
    assert (streamed.stop_reason, streamed.stop_sequence) == (whole.stop_reason, whole.stop_sequence)
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    return whole


def strip(block: Any) -> Any:
    return block.model_dump(exclude={"id", "parsed_output"})


async def test_a_text(serve: Any) -> None:
    async with serve(library=httpx2) as http:
        message = await ask_twice(http, max_tokens=9, system="Be brief.")
        assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 9)
        assert message.content[0].text
        blocks = [{"type": "text", "text": "Hello", "cache_control": {"type": "ephemeral"}}]
        again = await ask_twice(
            http,
            max_tokens=9,
            system=[{"type": "text", "text": "Be brief."}],
            messages=[{"role": "user", "content": blocks}],
        )
        assert again.content[0].text == message.content[0].text


async def test_a_stop_sequence_is_named(serve: Any) -> None:
    async with serve(library=httpx2) as http:
        message = await ask_twice(http, stop_sequences=["e", "zzz"])
    assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", "e")
    assert all("e" not in block.text for block in message.content)


async def test_tools_and_their_results(serve: Any, ending: dict[str, float]) -> None:
    extra = {"logit_bias": ending}
    async with serve(library=httpx2) as http:
        first = await ask_twice(http, tools=[TOOL], tool_choice={"type": "any"}, extra_body=extra, max_tokens=300)
        assert first.stop_reason == "tool_use"
        calls = [block for block in first.content if block.type == "tool_use"]
        for call in calls:
            jsonschema.validate(call.input, PLACE)
        results: list[Any] = [{"type": "tool_result", "tool_use_id": call.id, "content": "rain"} for call in calls]
        history = [
            *HELLO,
            {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in first.content]},
            {"role": "user", "content": [*results, {"type": "text", "text": "So?"}]},
        ]
        second = await ask_twice(http, messages=history, tools=[TOOL], max_tokens=4)
        assert second.content
        counted = await open_client(http).messages.count_tokens(model="tiny", messages=history, tools=[TOOL])
        assert counted.input_tokens == second.usage.input_tokens + second.usage.cache_read_input_tokens
        named: Any = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
        third = await ask_twice(http, tools=[TOOL], tool_choice=named, extra_body=extra)
        assert [block.name for block in third.content] == ["weather"]


async def test_a_thought_is_a_block_of_its_own(serve: Any) -> None:
    async with serve(library=httpx2, thinks=True) as http:
        message = await ask_twice(http, thinking={"type": "enabled", "budget_tokens": 10}, max_tokens=40)
        assert [block.type for block in message.content] == ["thinking", "text"]
        quiet = await ask_twice(http, thinking={"type": "disabled"}, max_tokens=8)
        assert [block.type for block in quiet.content] == ["text"]


async def test_a_schema(serve: Any, ending: dict[str, float]) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": PLACE}}
    async with serve(library=httpx2) as http:
        message = await open_client(http).messages.create(
            model="tiny", messages=HELLO, max_tokens=100, output_config=config, extra_body={"logit_bias": ending}
        )
    assert message.content[0].text.startswith("{")


async def test_errors_have_their_shape(serve: Any) -> None:
    async with serve(library=httpx2) as http:
        client = open_client(http)
        with pytest.raises(NotFoundError) as missing:
            await client.messages.create(model="other", messages=HELLO, max_tokens=5)
        assert missing.value.body["type"] == "error"
        assert missing.value.body["error"]["type"] == "not_found_error"
        for change in (
            {"max_tokens": 0},
            {"messages": []},
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            {"tool_choice": {"type": "any"}},
            {"tool_choice": {"type": "tool"}, "tools": [TOOL]},
            {"tools": [TOOL, TOOL]},
            {"thinking": {"type": "enabled", "budget_tokens": 5}},
            {"messages": [{"role": "user", "content": "x" * 9000}]},
        ):
            for stream in (False, True):
                with pytest.raises(BadRequestError) as refusal:
                    options: Any = {"model": "tiny", "messages": HELLO, "max_tokens": 5, **change}
                    await client.messages.create(**options, stream=stream)
                assert refusal.value.body["error"]["type"] == "invalid_request_error"
                assert refusal.value.body["error"]["message"]


def test_results_come_before_what_the_user_adds() -> None:
    turns: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "So?"},
                {
                    "type": "tool_result",
                    "tool_use_id": "1",
                    "content": [{"type": "text", "text": "no"}],
                    "is_error": True,
                },
            ],
        },
    ]
    ask = MessageRequest.model_validate({"model": "m", "max_tokens": 5, "messages": turns, "system": "Rules."}).ask()
    assert [message["role"] for message in ask.messages] == ["system", "user", "assistant", "tool", "user"]
    assert ask.messages[2]["reasoning_content"] == "Hm."
    assert ask.messages[2]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x":1}'}
    assert ask.messages[3]["content"] == "Error: no"


def test_an_empty_answer_is_a_message_without_blocks() -> None:
    growing = GrowingMessage("m")
    growing.finish(Done(Usage(input_tokens=3, cached_tokens=2), Receipt()))
    assert growing.body.content == []
    assert (growing.body.usage.input_tokens, growing.body.usage.cache_read_input_tokens) == (1, 2)
