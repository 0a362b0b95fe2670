"""The official OpenAI client against a tiny model: formats, tools and thoughts, whole and streamed alike."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from openai import AsyncOpenAI, BadRequestError, pydantic_function_tool
from pydantic import BaseModel

pytestmark = pytest.mark.anyio

HELLO: list[Any] = [{"role": "user", "content": "Hello"}]

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}

PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}


def tool(name: str, parameters: dict[str, Any] = PLACE) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def schema_format(schema: dict[str, Any]) -> Any:
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


def open_client(http: Any) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://tiny/v1", http_client=http, max_retries=0)


class Streamed:
    """A stream joined again, per choice."""

    def __init__(self) -> None:
        self.text: dict[int, str] = {}
        self.thought: dict[int, str] = {}
        self.calls: dict[int, list[dict[str, str]]] = {}
        self.reason: dict[int, str] = {}
        self.tokens: dict[int, int] = {}

    @classmethod
    async def read(cls, client: AsyncOpenAI, **options: Any) -> Streamed:
        told = cls()
        async for chunk in await client.chat.completions.create(stream=True, **options):
            for choice in chunk.choices:
                told.add(choice)
        return told

    def add(self, choice: Any) -> None:
        i, delta = choice.index, choice.delta
        self.text[i] = self.text.get(i, "") + (delta.content or "")
        self.thought[i] = self.thought.get(i, "") + (getattr(delta, "reasoning_content", None) or "")
        calls = self.calls.setdefault(i, [])
        for piece in delta.tool_calls or ():
            if piece.id is not None:
                assert piece.index == len(calls)
                calls.append({"name": piece.function.name, "arguments": ""})
            calls[piece.index]["arguments"] += piece.function.arguments
        if choice.logprobs is not None:
            self.tokens[i] = self.tokens.get(i, 0) + len(choice.logprobs.content)
        if choice.finish_reason is not None:
            self.reason[i] = choice.finish_reason


async def test_a_schema_is_kept_streamed_and_whole(serve: Any, ending: dict[str, float]) -> None:
    options = {
        "model": "tiny",
        "messages": HELLO,
        "response_format": schema_format(PERSON),
        "logit_bias": ending,
        "n": 4,
        "seed": 1,
        "logprobs": True,
        "top_logprobs": 2,
    }
    async with serve() as http:
        client = open_client(http)
        whole = await client.chat.completions.create(**options)
        streamed = await Streamed.read(client, **options)
    for choice in whole.choices:
        assert choice.finish_reason == streamed.reason[choice.index] == "stop"
        assert choice.message.content == streamed.text[choice.index]
        assert len(choice.logprobs.content) == streamed.tokens[choice.index]
        assert all(-1e4 < entry.logprob <= 0 for token in choice.logprobs.content for entry in token.top_logprobs)
        jsonschema.validate(json.loads(choice.message.content), PERSON)
    assert len({choice.message.content for choice in whole.choices}) > 1


async def test_the_clients_own_parsing_helpers(serve: Any, ending: dict[str, float]) -> None:
    class Color(BaseModel):
        name: str
        shades: list[int]

    async with serve() as http:
        answer = await open_client(http).chat.completions.parse(
            model="tiny", messages=HELLO, response_format=Color, logit_bias=ending, seed=3, max_tokens=400
        )
        assert isinstance(answer.choices[0].message.parsed, Color)
        called = await open_client(http).chat.completions.parse(
            model="tiny",
            messages=HELLO,
            tools=[pydantic_function_tool(Color)],
            tool_choice="required",
            parallel_tool_calls=False,
            logit_bias=ending,
            seed=3,
        )
        assert isinstance(called.choices[0].message.tool_calls[0].function.parsed_arguments, Color)


@pytest.mark.parametrize(
    ("format", "check"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, lambda text: len(text) == 6 and text[3] == "-"),
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"json": {"const": 7}}, lambda text: text == "7"),
        ({"grammar": 'start: "a" /b{1,3}/ "c"'}, lambda text: text.startswith("ab") and text.endswith("bc")),
    ],
)
async def test_formats_beyond_json_in_chat_and_completions(serve: Any, format: Any, check: Any) -> None:
    async with serve() as http:
        client, extra = open_client(http), {"structured_outputs": format}
        chat = await client.chat.completions.create(model="tiny", messages=HELLO, extra_body=extra)
        text = await client.completions.create(model="tiny", prompt=["Hello", "Hi"], extra_body=extra, max_tokens=50)
    assert check(chat.choices[0].message.content)
    assert all(check(choice.text) and choice.finish_reason == "stop" for choice in text.choices)


@pytest.mark.parametrize(
    "options",
    [
        {"response_format": schema_format({"not": {"type": "string"}})},
        {"response_format": schema_format({"type": "string", "format": "poem"})},
        {"extra_body": {"structured_outputs": {"regex": "("}}},
        {"extra_body": {"structured_outputs": {"grammar": ""}}},
        {"tools": [tool("f"), tool("f")]},
        {"tools": [tool("f", {"type": "string"})]},
        {"tools": [tool("f")], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        {"tools": [tool("f", {"type": "object", "minContains": 2})], "tool_choice": "required"},
        {"extra_body": {"thinking_budget": 5}},
    ],
)
async def test_what_cannot_be_guaranteed_is_a_400_and_the_next_request_works(serve: Any, options: Any) -> None:
    async with serve() as http:
        client = open_client(http)
        for stream in (False, True):
            with pytest.raises(BadRequestError) as refusal:
                await client.chat.completions.create(model="tiny", messages=HELLO, stream=stream, **options)
            assert refusal.value.body["param"]
        assert (await client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)).choices


class TestTools:
    async def check(self, serve: Any, **options: Any) -> list[list[dict[str, str]]]:
        """The calls of every choice, the same streamed and whole."""
        options = {"model": "tiny", "messages": HELLO, "n": 3, "seed": 5, "max_tokens": 300, **options}
        async with serve() as http:
            client = open_client(http)
            whole = await client.chat.completions.create(**options)
            streamed = await Streamed.read(client, **options)
        told = []
        for choice in whole.choices:
            message = choice.message
            calls = [
                {"name": call.function.name, "arguments": call.function.arguments} for call in message.tool_calls or ()
            ]
            assert calls == streamed.calls[choice.index]
            assert (message.content or "") == streamed.text[choice.index]
            assert choice.finish_reason == streamed.reason[choice.index]
            assert choice.finish_reason != "tool_calls" or calls
            told.append(calls)
            for call in calls if choice.finish_reason == "tool_calls" else ():
                jsonschema.validate(json.loads(call["arguments"]), PLACE)
        return told

    async def test_required_calls_at_least_one(self, serve: Any, ending: dict[str, float]) -> None:
        tools = [tool("weather"), tool("time")]
        for calls in await self.check(serve, tools=tools, tool_choice="required", logit_bias=ending):
            assert {call["name"] for call in calls} <= {"weather", "time"} and calls

    async def test_a_named_tool_is_called_once(self, serve: Any, ending: dict[str, float]) -> None:
        choice = {"type": "function", "function": {"name": "time"}}
        tools = [tool("weather"), tool("time")]
        for calls in await self.check(serve, tools=tools, tool_choice=choice, logit_bias=ending):
            assert [call["name"] for call in calls] == ["time"]

    async def test_auto_lets_the_model_decide(self, serve: Any, ending: dict[str, float]) -> None:
        bias = {**ending, "400": 9.0}  # <tool_call>
        counts = [len(calls) for calls in await self.check(serve, tools=[tool("f")], logit_bias=bias, n=8)]
        assert max(counts) > 0
        assert min(counts) == 0

    async def test_none_calls_nothing(self, serve: Any) -> None:
        for calls in await self.check(serve, tools=[tool("f")], tool_choice="none", max_tokens=20):
            assert calls == []

    async def test_a_conversation_goes_on_with_results(self, serve: Any, ending: dict[str, float]) -> None:
        async with serve() as http:
            client = open_client(http)
            first = await client.chat.completions.create(
                model="tiny", messages=HELLO, tools=[tool("f")], tool_choice="required", logit_bias=ending, seed=2
            )
            message = first.choices[0].message
            assert message.content is None
            results = [{"role": "tool", "tool_call_id": call.id, "content": "42"} for call in message.tool_calls or ()]
            second = await client.chat.completions.create(
                model="tiny", messages=[*HELLO, message.model_dump(), *results], tools=[tool("f")], max_tokens=3
            )
            assert second.choices


class TestThoughts:
    CLOSE = 403
    """</think>"""

    async def ask(self, serve: Any, **options: Any) -> Any:
        """The whole answer, checked against the streamed one."""
        extra = {"chat_template_kwargs": {"enable_thinking": True}, **options.pop("extra_body", {})}
        options = {"model": "tiny", "messages": HELLO, "seed": 4, "max_tokens": 200, "extra_body": extra, **options}
        async with serve(thinks=True) as http:
            client = open_client(http)
            whole = await client.chat.completions.create(**options)
            streamed = await Streamed.read(client, **options)
        message = whole.choices[0].message
        assert (getattr(message, "reasoning_content", None) or "") == streamed.thought[0]
        assert (message.content or "") == streamed.text[0]
        return whole

    async def test_a_schema_applies_to_the_answer_only(self, serve: Any, ending: dict[str, float]) -> None:
        answer = await self.ask(
            serve,
            response_format=schema_format(PERSON),
            logit_bias={**ending, str(self.CLOSE): 7.0},
            extra_body={"thinking_budget": 20},
        )
        message = answer.choices[0].message
        assert answer.choices[0].finish_reason == "stop"
        assert message.reasoning_content
        jsonschema.validate(json.loads(message.content), PERSON)
        assert 0 < answer.usage.completion_tokens_details.reasoning_tokens <= 21

    async def test_a_thought_may_be_followed_by_calls(self, serve: Any, ending: dict[str, float]) -> None:
        answer = await self.ask(
            serve,
            tools=[tool("f")],
            tool_choice="required",
            logit_bias=ending,
            extra_body={"thinking_budget": 6},
        )
        assert answer.choices[0].message.reasoning_content
        assert answer.choices[0].message.tool_calls[0].function.name == "f"
        assert answer.choices[0].finish_reason == "tool_calls"

    async def test_a_budget_alone(self, serve: Any) -> None:
        answer = await self.ask(serve, max_tokens=40, extra_body={"thinking_budget": 10})
        assert answer.usage.completion_tokens_details.reasoning_tokens <= 11
        assert answer.choices[0].message.content

    async def test_effort_reaches_the_template(self, serve: Any) -> None:
        options = {"model": "tiny", "messages": HELLO, "max_tokens": 12, "seed": 1}
        async with serve(thinks=True) as http:
            client = open_client(http)
            high = await client.chat.completions.create(reasoning_effort="high", **options)
            none = await client.chat.completions.create(reasoning_effort="none", **options)
        assert high.choices[0].message.reasoning_content and not high.choices[0].message.content
        assert none.choices[0].message.content and not hasattr(none.choices[0].message, "reasoning_content")

    async def test_stop_strings_are_looked_for_in_the_answer(self, serve: Any) -> None:
        answer = await self.ask(serve, max_tokens=60, stop=["e"], extra_body={"thinking_budget": 20})
        assert "e" in answer.choices[0].message.reasoning_content
        assert "e" not in answer.choices[0].message.content


class TestTokens:
    async def test_texts_and_conversations_are_spelled(self, serve: Any) -> None:
        async with serve() as http:
            text = "Hello <tool_call> naïve 東京"
            spelled = (await http.post("/tokenize", json={"model": "tiny", "prompt": text})).json()
            assert spelled["count"] == len(spelled["tokens"])
            back = await http.post("/detokenize", json={"model": "tiny", "tokens": spelled["tokens"]})
            assert back.json() == {"prompt": text}
            chat = {"model": "tiny", "messages": HELLO, "return_token_strs": True, "tools": [tool("f")]}
            spelled = (await http.post("/tokenize", json=chat)).json()
            usage = (await http.post("/v1/chat/completions", json={**chat_only(chat), "max_tokens": 1})).json()["usage"]
            assert spelled["count"] == usage["prompt_tokens"] == len(spelled["token_strs"])

    @pytest.mark.parametrize(
        ("path", "change"),
        [
            ("/tokenize", {}),
            ("/tokenize", {"prompt": "x", "messages": HELLO}),
            ("/tokenize", {"prompt": "x", "tools": [tool("f")]}),
            ("/tokenize", {"prompt": 5}),
            ("/detokenize", {"tokens": [100_000]}),
            ("/detokenize", {"tokens": ["x"]}),
        ],
    )
    async def test_nonsense_is_a_400(self, serve: Any, path: str, change: dict[str, Any]) -> None:
        async with serve() as http:
            assert (await http.post(path, json={"model": "tiny", **change})).status_code == 400


def chat_only(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if key != "return_token_strs"}
