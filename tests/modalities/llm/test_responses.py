"""The official OpenAI client's Responses API against a tiny model: items and events, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel

from polymux.core.errors import InvalidRequest
from polymux.gateway.schemas.responses import ResponseRequest

pytestmark = pytest.mark.anyio

PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOL: Any = {"type": "function", "name": "weather", "parameters": PLACE, "strict": True}


def open_client(http: Any) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://tiny/v1", http_client=http, max_retries=0)


async def ask_twice(http: Any, **options: Any) -> Any:
    """The whole response, checked against its stream."""
    client = open_client(http)
    options = {"model": "tiny", "input": "Hello", **options, "extra_body": {"seed": 7, **options.get("extra_body", {})}}
    whole = await client.responses.create(**options)
    events = [event async for event in await client.responses.create(stream=True, **options)]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:2]] == ["response.created", "response.in_progress"]
    final = events[-1].response
    assert events[-1].type == f"response.{whole.status}" == f"response.{final.status}"
    assert [strip(item) for item in final.output] == [strip(item) for item in whole.output]
    assert final.usage.output_tokens == whole.usage.output_tokens
    check_events(events, final)
    return whole


def strip(item: Any) -> Any:
    return item.model_dump(exclude={"id", "call_id"})


def check_events(events: list[Any], final: Any) -> None:
    """Every item begins, grows and ends in order; deltas joined are its text."""
    texts = {index: "" for index in range(len(final.output))}
    opened: list[int] = []
    for event in events:
        if event.type == "response.output_item.added":
            assert event.output_index == len(opened)
            opened.append(event.output_index)
        elif event.type.endswith(".delta"):
            assert event.output_index == opened[-1]
            texts[event.output_index] += event.delta
    for index, item in enumerate(final.output):
        assert texts[index] == (item.arguments if item.type == "function_call" else item.content[0].text)


async def test_a_text(serve: Any) -> None:
    async with serve() as http:
        response = await ask_twice(http, max_output_tokens=12, instructions="Be brief.", metadata={"a": "b"})
    assert response.status == "incomplete" and response.incomplete_details.reason == "max_output_tokens"
    assert response.output_text and response.usage.output_tokens == 12
    assert response.metadata == {"a": "b"} and response.instructions == "Be brief."


async def test_a_schema(serve: Any, ending: dict[str, float]) -> None:
    text = {"format": {"type": "json_schema", "name": "place", "schema": PLACE, "strict": True}}
    async with serve() as http:
        response = await ask_twice(http, text=text, extra_body={"logit_bias": ending})
        jsonschema.validate(json.loads(response.output_text), PLACE)
        assert response.status == "completed"

        class Place(BaseModel):
            city: str

        parsed = await open_client(http).responses.parse(
            model="tiny", input="Hello", text_format=Place, extra_body={"logit_bias": ending, "seed": 2}
        )
        assert isinstance(parsed.output_parsed, Place)


async def test_tools_and_their_results(serve: Any, ending: dict[str, float]) -> None:
    options: dict[str, Any] = {"tools": [TOOL], "extra_body": {"logit_bias": ending}}
    async with serve() as http:
        first = await ask_twice(http, **options, tool_choice="required", parallel_tool_calls=False)
        call = first.output[0]
        assert call.type == "function_call" and call.name == "weather"
        jsonschema.validate(json.loads(call.arguments), PLACE)
        history = [
            {"role": "user", "content": "Hello"},
            call.model_dump(by_alias=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        second = await ask_twice(http, input=history, tools=[TOOL], max_output_tokens=5)
        assert second.output
        named = {"type": "function", "name": "weather"}
        third = await ask_twice(http, **options, tool_choice=named)
        assert [item.name for item in third.output] == ["weather"]


async def test_a_thought_is_an_item_of_its_own(serve: Any) -> None:
    async with serve(thinks=True) as http:
        response = await ask_twice(
            http, reasoning={"effort": "high"}, max_output_tokens=40, extra_body={"thinking_budget": 10}
        )
        assert [item.type for item in response.output] == ["reasoning", "message"]
        assert 0 < response.usage.output_tokens_details.reasoning_tokens <= 11
        again = [
            {"role": "user", "content": "Hello"},
            *(item.model_dump(by_alias=True) for item in response.output),
        ]
        assert (await ask_twice(http, input=[*again, {"role": "user", "content": "And?"}], max_output_tokens=3)).output


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "messages[0].content[0].image_url",
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"not": {}}}}}, "response_format"),
        ({"thinking_budget": 5}, "thinking_budget"),
        ({"unknown": 1}, "unknown"),
    ],
)
async def test_what_is_not_served_is_refused(serve: Any, change: dict[str, Any], param: str) -> None:
    async with serve() as http:
        with pytest.raises(BadRequestError) as refusal:
            await open_client(http).responses.create(
                model="tiny", input=change.pop("input", "Hello"), extra_body=change, stream=True
            )
        assert refusal.value.body["param"] == param


def test_what_the_assistant_did_in_a_row_is_one_message() -> None:
    items: list[dict[str, Any]] = [
        {"role": "developer", "content": "Rules."},
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "x"},
        {"role": "assistant", "content": "Done."},
    ]
    messages = ResponseRequest.model_validate({"model": "m", "input": items}).messages()
    assert [message["role"] for message in messages] == ["developer", "user", "assistant", "tool", "assistant"]
    assert messages[1]["content"] == "ab"
    turn = messages[2]
    assert (turn["content"], turn["reasoning_content"]) == ("I look.", "Hm.")
    assert [call["id"] for call in turn["tool_calls"]] == ["1", "2"]
    with pytest.raises(InvalidRequest):
        ResponseRequest.model_validate({"model": "m", "input": "x", "tool_choice": "required"}).ask()
