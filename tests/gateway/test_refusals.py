"""Bad input is answered with the one error shape and the right status, never 500, and the next request works."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from polymux.core.testing.service import FakeService

pytestmark = pytest.mark.anyio

CHAT = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
TEXT = {"model": "stub", "prompt": "hi"}
EMBED = {"model": "stub", "input": "hi"}

CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "f"}}
PATHS = {"chat": "/v1/chat/completions", "text": "/v1/completions", "embed": "/v1/embeddings"}


def check_error(answer: httpx.Response, status: int) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-request-id"]
    body = json.loads(answer.text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


async def check_next_works(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATHS["chat"], json=CHAT)).status_code == 200


BAD_BODIES = {
    "no JSON": b"hello",
    "cut off": b'{"model": "stub", "messages": [',
    "empty": b"",
    "an array": b"[]",
    "a string": b'"x"',
    "null": b"null",
    "NaN": b'{"model": "stub", "temperature": NaN, "messages": [{"role": "user", "content": "hi"}]}',
    "Infinity": b'{"model": "stub", "temperature": Infinity, "messages": [{"role": "user", "content": "hi"}]}',
    "beyond a double": b'{"model": "stub", "temperature": 1e999, "messages": [{"role": "user", "content": "hi"}]}',
    "lone surrogate": b'{"model": "stub", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "not UTF-8": b'{"model": "\xff"}',
    "deep arrays": b"[" * 200_000,
    "deep objects": b'{"a":' * 50_000 + b"1" + b"}" * 50_000,
    "wide nothing": b'{"a":[' + b"[]," * 300_000 + b"[]]}",
    "trailing text": b'{"model": "stub"} {}',
}


@pytest.mark.parametrize("body", BAD_BODIES.values(), ids=BAD_BODIES.keys())
async def test_malformed_json(client: httpx.AsyncClient, body: bytes) -> None:
    """vllm 5822: one malformed body stopped everyone."""
    answer = await client.post(PATHS["chat"], content=body, headers={"content-type": "application/json"})
    check_error(answer, 400)
    await check_next_works(client)


@pytest.mark.parametrize("media", ["text/plain", "multipart/form-data", "application/xml", ""])
async def test_wrong_content_type(client: httpx.AsyncClient, media: str) -> None:
    """Also what keeps a web page from posting here without the browser asking first."""
    answer = await client.post(PATHS["chat"], content=json.dumps(CHAT), headers={"content-type": media})
    check_error(answer, 415)


async def test_json_with_a_charset_is_json(client: httpx.AsyncClient) -> None:
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    assert (await client.post(PATHS["chat"], content=json.dumps(CHAT), headers=headers)).status_code == 200


BAD_FIELDS: list[tuple[str, dict[str, Any], str]] = [
    *[
        (kind, {field: value}, field)
        for kind in ("chat", "text")
        for field, value in [
            ("temperature", -0.1),
            ("temperature", 2.1),
            ("temperature", "0.5"),
            ("temperature", True),
            ("top_p", 0),
            ("top_p", 1.1),
            ("n", 0),
            ("n", 129),
            ("n", 1.5),
            ("n", "1"),
            ("max_tokens", 0),
            ("max_tokens", -1),
            ("max_tokens", 10**30),
            ("stop", ""),
            ("stop", 5),
            ("stop", ["a"] * 17),
            ("seed", 2**70),
            ("seed", 1.5),
            ("presence_penalty", 3),
            ("frequency_penalty", -3),
            ("logit_bias", {"x": 1}),
            ("logit_bias", {"99999999999999999999": 1}),
            ("logit_bias", []),
            ("min_p", 2),
            ("top_k", -2),
            ("repetition_penalty", 0),
            ("stop_token_ids", ["a"]),
            ("ignore_eos", "yes"),
            ("stream", "yes"),
            ("stream_options", {"include_usage": True}),
            ("metadata", 3),
            ("model", None),
            ("model", 7),
            ("nonsense", 1),
        ]
    ],
    ("chat", {"messages": None}, "messages"),
    ("chat", {"messages": []}, "messages"),
    ("chat", {"messages": "hi"}, "messages"),
    ("chat", {"messages": [None]}, "messages[0]"),
    ("chat", {"messages": [{}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
    ("chat", {"messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "assistant", "content": None}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "messages[0].tool_calls"),
    ("chat", {"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[0].tool_calls[0].function"),
    ("chat", {"tools": [{"type": "retrieval"}]}, "tools[0]"),
    ("chat", {"tools": [{"type": "function", "function": {"name": "two words"}}]}, "tools[0].function.name"),
    ("chat", {"tool_choice": "required"}, "tool_choice"),
    ("chat", {"tool_choice": "sometimes", "tools": [TOOL]}, "tool_choice"),
    ("chat", {"tool_choice": {"type": "function", "function": {}}, "tools": [TOOL]}, "tool_choice.function.name"),
    ("chat", {"parallel_tool_calls": True}, "parallel_tool_calls"),
    ("chat", {"reasoning_effort": "enormous"}, "reasoning_effort"),
    ("chat", {"thinking_budget": -1}, "thinking_budget"),
    ("chat", {"response_format": {}}, "response_format"),
    ("chat", {"response_format": {"type": "xml"}}, "response_format"),
    ("chat", {"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
    ("chat", {"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format.json_schema.name"),
    ("chat", {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
    ("text", {"structured_outputs": {}}, "structured_outputs"),
    ("text", {"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ("chat", {"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ("chat", {"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
    ("chat", {"messages": [{"role": "user", "content": "x", "mood": "good"}]}, "messages[0].mood"),
    ("chat", {"top_logprobs": 3}, "top_logprobs"),
    ("chat", {"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ("chat", {"logprobs": 1}, "logprobs"),
    ("chat", {"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
    ("chat", {"chat_template_kwargs": {"a": {"b": 1}}}, "chat_template_kwargs.a"),
    ("text", {"prompt": ""}, "prompt"),
    ("text", {"prompt": []}, "prompt"),
    ("text", {"prompt": [[]]}, "prompt[0]"),
    ("text", {"prompt": ["a", ""]}, "prompt[1]"),
    ("text", {"prompt": ["a", 1]}, "prompt[1]"),
    ("text", {"prompt": [1, "a"]}, "prompt"),
    ("text", {"prompt": [-1]}, "prompt"),
    ("text", {"prompt": [2**40]}, "prompt"),
    ("text", {"prompt": [True]}, "prompt"),
    ("text", {"prompt": {"a": 1}}, "prompt"),
    ("text", {"prompt": ["a"] * 100, "n": 100}, "n"),
    ("text", {"logprobs": True}, "logprobs"),
    ("text", {"logprobs": 21}, "logprobs"),
    ("embed", {"input": ""}, "input"),
    ("embed", {"input": []}, "input"),
    ("embed", {"input": ["a"] * 2049}, "input"),
    ("embed", {"input": None}, "input"),
    ("embed", {"input": [1.5]}, "input"),
    ("embed", {"dimensions": 0}, "dimensions"),
    ("embed", {"encoding_format": "base32"}, "encoding_format"),
    ("embed", {"temperature": 0}, "temperature"),
]


@pytest.mark.parametrize(("kind", "change", "param"), BAD_FIELDS)
async def test_wrong_field_is_named(
    client: httpx.AsyncClient, service: FakeService, kind: str, change: dict[str, Any], param: str
) -> None:
    base = {"chat": CHAT, "text": TEXT, "embed": EMBED}[kind]
    error = check_error(await client.post(PATHS[kind], json={**base, **change}), 400)
    assert error["param"].startswith(param), error
    assert error["type"] == "invalid_request_error"
    assert service.opened == []
    await check_next_works(client)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("chat", {"store": True}),
        ("chat", {"modalities": ["text", "audio"]}),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        ),
        ("text", {"best_of": 3}),
        ("text", {"suffix": "tail"}),
        ("text", {"unknown": None}),
    ],
)
async def test_unserved_field_is_refused(client: httpx.AsyncClient, kind: str, change: dict[str, Any]) -> None:
    """A field is honoured or refused, never ignored in silence."""
    base = {"chat": CHAT, "text": TEXT}[kind]
    error = check_error(await client.post(PATHS[kind], json={**base, **change}), 400)
    assert error["code"] == "unsupported_parameter"


@pytest.mark.parametrize(
    "change",
    [
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "n": None, "stop": None},
        {"messages": [{"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "annotations": []}]},
    ],
)
async def test_fields_that_change_nothing_are_accepted(client: httpx.AsyncClient, change: dict[str, Any]) -> None:
    """What clients send on every request, and the assistant's own message sent back."""
    assert (await client.post(PATHS["chat"], json={**CHAT, **change})).status_code == 200


@pytest.mark.parametrize("kind", PATHS)
async def test_unknown_model_lists_the_served_names(client: httpx.AsyncClient, kind: str) -> None:
    """sglang 31404: an unknown model was answered by whichever was loaded."""
    base = {"chat": CHAT, "text": TEXT, "embed": EMBED}[kind]
    error = check_error(await client.post(PATHS[kind], json={**base, "model": "gpt-9"}), 404)
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert "stub" in error["message"]


async def test_unknown_path_and_method(client: httpx.AsyncClient) -> None:
    check_error(await client.get("/v1/nothing"), 404)
    check_error(await client.delete(PATHS["chat"]), 405)
    check_error(await client.get(PATHS["chat"]), 405)


async def test_body_over_the_limit_is_not_read(service: FakeService, talking: Any) -> None:
    """A declared length is refused unread; an undeclared one as soon as it exceeds the limit."""
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        for _ in range(1000):
            sent += 1000
            yield b"x" * 1000

    async with talking(service, max_body_bytes=10_000) as client:
        headers = {"content-type": "application/json"}
        big = json.dumps({**CHAT, "user": "x" * 20_000})
        check_error(await client.post(PATHS["chat"], content=big, headers=headers), 413)
        check_error(await client.post(PATHS["chat"], content=endless(), headers=headers), 413)
        assert sent < 20_000
        await check_next_works(client)


async def test_huge_unknown_name_is_not_echoed(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATHS["chat"], json={**CHAT, "x" * 100_000: 1})
    check_error(answer, 400)
    assert len(answer.content) < 1000


async def test_a_fault_of_ours_is_a_plain_500(client: httpx.AsyncClient, service: FakeService) -> None:
    """Its text stays in the log: error messages have leaked addresses and names elsewhere."""

    async def broken(served: Any, task: str, ask: Any) -> Any:
        raise RuntimeError("secret 0x7f00")
        yield

    service.script = broken
    error = check_error(await client.post(PATHS["chat"], json=CHAT), 500)
    assert "secret" not in error["message"]
