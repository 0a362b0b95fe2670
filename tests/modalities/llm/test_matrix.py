"""Every pair of features works together, streamed and whole, all requests at once on one engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Iterator
from random import Random
from typing import Any

import httpx
import jsonschema
import pytest

pytestmark = pytest.mark.anyio

SHAPE = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("weather", "time")]

FEATURES: dict[str, tuple[Any, ...]] = {
    "n": (1, 3),
    "tools": (None, "auto", "required"),
    "schema": (False, True),
    "thought": (None, 0, 8),
    "logprobs": (None, 0, 2),
    "stop": (False, True),
    "penalty": (False, True),
    "greedy": (False, True),
    "short": (False, True),
}


def cover_pairs() -> Iterator[dict[str, Any]]:
    """Requests that together have every pair of values of every two features."""
    random = Random(0)
    pairs = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(FEATURES, 2)
        for a in FEATURES[one]
        for b in FEATURES[two]
    }
    while pairs:
        drawn = [{name: random.choice(values) for name, values in FEATURES.items()} for _ in range(60)]
        best = max(drawn, key=lambda each: len(pairs & set(itertools.combinations(each.items(), 2))))
        pairs -= set(itertools.combinations(best.items(), 2))
        yield best


def make_body(features: dict[str, Any], bias: dict[str, float]) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hello " * 12}],
        "n": features["n"],
        "seed": 5,
        "max_tokens": 12 if features["short"] else 300,
        "logit_bias": bias,
        "chat_template_kwargs": {"enable_thinking": features["thought"] is not None},
    }
    if features["tools"] is not None:
        body |= {"tools": TOOLS, "tool_choice": features["tools"]}
    if features["schema"]:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}
    if features["thought"] is not None:
        body["thinking_budget"] = features["thought"]
    if features["logprobs"] is not None:
        body |= {"logprobs": True, "top_logprobs": features["logprobs"]}
    if features["stop"]:
        body["stop"] = ["}", "o"]
    if features["penalty"]:
        body |= {"frequency_penalty": 0.5, "presence_penalty": 0.2}
    if features["greedy"]:
        body["temperature"] = 0
    return body


class Told:
    """One choice, whole."""

    def __init__(self) -> None:
        self.text = self.thought = ""
        self.calls: list[list[str]] = []
        self.tokens: list[str] = []
        self.reason: str | None = None

    def add(self, message: dict[str, Any], choice: dict[str, Any]) -> None:
        self.text += message.get("content") or ""
        self.thought += message.get("reasoning_content") or ""
        for piece in message.get("tool_calls") or ():
            if piece.get("id"):
                self.calls.append([piece["function"]["name"], ""])
            self.calls[piece.get("index", len(self.calls) - 1)][1] += piece["function"]["arguments"]
        if choice.get("logprobs"):
            self.tokens += [token["token"] for token in choice["logprobs"]["content"]]
        self.reason = choice["finish_reason"] or self.reason

    def check(self, features: dict[str, Any]) -> None:
        whole = self.reason != "length"
        if self.reason == "tool_calls":
            assert self.calls and all(jsonschema.validate(json.loads(call[1]), PLACE) is None for call in self.calls)
        if features["tools"] == "required":
            assert not self.text
            assert self.calls or not whole
        elif features["schema"] and whole and not self.calls and not features["stop"]:
            jsonschema.validate(json.loads(self.text), SHAPE)
        if features["stop"]:
            assert not {"}", "o"} & set(self.text)
        if features["thought"] in (None, 0):
            assert not self.thought


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Told], dict[str, Any]]:
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    told = [Told() for _ in range(body["n"])]
    for choice in answer.json()["choices"]:
        told[choice["index"]].add(choice["message"], choice)
    return told, answer.json()["usage"]


async def listen(http: httpx.AsyncClient, body: dict[str, Any]) -> list[Told]:
    answer = await http.post("/v1/chat/completions", json={**body, "stream": True})
    told = [Told() for _ in range(body["n"])]
    for line in answer.text.splitlines():
        if line.startswith("data: {"):
            for choice in json.loads(line[6:])["choices"]:
                told[choice["index"]].add(choice["delta"], choice)
    return told


async def test_every_pair_of_features(serve: Any, ending: dict[str, float]) -> None:
    bias = {**ending, "403": 7.0}  # </think>
    requests = list(cover_pairs())
    async with serve(thinks=True) as http:
        bodies = [make_body(features, bias) for features in requests]
        whole = await asyncio.gather(*(ask(http, body) for body in bodies))
        streamed = await asyncio.gather(*(listen(http, body) for body in bodies))
    for features, (told, usage), heard in zip(requests, whole, streamed):
        assert len(told) == features["n"]
        for one, other in zip(told, heard):
            assert vars(one) == vars(other), features
            one.check(features)
        if features["logprobs"] is not None and not features["stop"]:
            ended = sum(one.reason != "length" for one in told)
            said = sum(len(one.tokens) for one in told)
            assert usage["completion_tokens"] - ended <= said <= usage["completion_tokens"], features
