"""Every pair of features works together, streamed and whole, all requests at once on one engine."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import polymux_starter
import pytest
from transformers import AutoModelForCausalLM

from polymux.core.compute.device import Device
from polymux.core.engine.load import open_site
from polymux.core.engine.site import SiteSettings
from polymux.core.models import ModelFiles, resolve
from polymux.core.plugins import load_plugins
from polymux.core.service import Served, Service
from polymux.core.testing.adapting import write_adapter
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.features import FEATURES, cover_pairs, write_page
from polymux.core.testing.tiny import build, tiny_llama
from polymux.gateway.app import create_app
from polymux.modalities.llm.plugin import TextGeneration

pytestmark = pytest.mark.anyio

SHAPE = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
PLACE = {"type": "object", "properties": {"city": {"type": "string", "maxLength": 9}}, "required": ["city"]}
TOOLS = [{"type": "function", "function": {"name": name, "parameters": PLACE}} for name in ("weather", "time")]

PAGE = Path(__file__).parents[3] / "docs" / "features.md"


def name_model(features: dict[str, Any]) -> str:
    name = "quick" if features["speculation"] else "tiny"
    return f"{name}:{features['LoRA']}" if features["LoRA"] else name


def make_body(features: dict[str, Any], number: int, *, tokens: int = 200, **options: Any) -> dict[str, Any]:
    """Request number `number`: its prompt is its own unless it is there for a cached prefix."""
    words = "Hello " * 24
    body: dict[str, Any] = {
        "model": ("quick" if features["speculation"] else "tiny")
        + (f":{features['LoRA']}" if features["LoRA"] else ""),
        "messages": [{"role": "user", "content": words if features["prefix cache"] else f"{number} {words}"}],
        "n": features["n"],
        "max_tokens": tokens,
        "stream": features["stream"],
        **options,
    }
    if features["seed"] is not None:
        body["seed"] = features["seed"]
    if features["tools"] is not None:
        body |= {"tools": TOOLS, "tool_choice": features["tools"]}
    if features["schema"]:
        body["response_format"] = {"type": "json_schema", "json_schema": {"name": "a", "schema": SHAPE}}
    if features["reasoning"] is not None:
        body["thinking_budget"] = features["reasoning"]
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
        if features["reasoning"] in (None, 0):
            assert not self.thought


async def ask(http: httpx.AsyncClient, body: dict[str, Any]) -> tuple[list[Told], dict[str, Any]]:
    """The choices and the usage, streamed or whole as the body says."""
    told = [Told() for _ in range(body["n"])]
    if body["stream"]:
        answer = await http.post("/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}})
        assert answer.status_code == 200, answer.text
        usage = None
        for line in answer.text.splitlines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                usage = event.get("usage") or usage
                for choice in event["choices"]:
                    told[choice["index"]].add(choice["delta"], choice)
        assert answer.text.endswith("data: [DONE]\n\n") and usage is not None
        return told, usage
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        told[choice["index"]].add(choice["message"], choice)
    return told, answer.json()["usage"]


def swap(body: dict[str, Any]) -> dict[str, Any]:
    """The same request, streamed if it was not, with guesses if it had none."""
    name, colon, adapter = body["model"].partition(":")
    other = {"tiny": "quick", "quick": "tiny"}[name]
    return {**body, "model": f"{other}{colon}{adapter}", "stream": not body["stream"]}


async def check_matrix(http: httpx.AsyncClient, requests: list[dict[str, Any]], bodies: list[dict[str, Any]]) -> None:
    """All at once; those with a seed, or greedy ones, once more the other way round, then from the cache."""
    first = await asyncio.gather(*(ask(http, body) for body in bodies))
    second = await asyncio.gather(*(ask(http, swap(body)) for body in bodies))
    third = await asyncio.gather(*(ask(http, body) for body in bodies))
    for features, once, other, again in zip(requests, first, second, third):
        fixed = features["seed"] is not None or features["greedy"]
        told, usage = once
        assert len(told) == features["n"]
        for mine, others, repeated in zip(told, other[0], again[0]):
            mine.check(features)
            others.check(features)
            if fixed:
                assert vars(mine) == vars(others), features
                assert vars(mine) == vars(repeated), features
        assert again[1]["prompt_tokens_details"]["cached_tokens"] > 0
        if features["n"] > 1 and features["seed"] is not None and not features["greedy"] and not features["stop"]:
            assert len({(one.text, one.thought, str(one.calls)) for one in told}) > 1, features
        if features["logprobs"] is not None and not features["stop"]:
            ended = sum(one.reason != "length" for one in told)
            said = sum(len(one.tokens) for one in told)
            assert usage["completion_tokens"] - ended <= said <= usage["completion_tokens"], features


async def test_every_pair_of_features(serve: Any, ending: dict[str, float], tmp_path: Path) -> None:
    model = build(lambda: tiny_llama(64))
    adapters = {
        name: str(write_adapter(tmp_path / name, model, seed=seed, strength=0.1))
        for seed, name in enumerate(("calm", "loud"))
    }
    bias = {**ending, "403": 7.0}  # </think>
    requests = list(cover_pairs())
    bodies = []
    for number, features in enumerate(requests):
        thinks = {"enable_thinking": features["reasoning"] is not None}
        bodies.append(make_body(features, number, logit_bias=bias, chat_template_kwargs=thinks))
    async with serve(thinks=True, adapters=adapters, speculation=6) as http:
        await check_matrix(http, requests, bodies)


def find_chat() -> ModelFiles:
    chat = polymux_starter.CHAT
    return resolve(chat.reference, sha256=chat.sha256, sources=load_plugins().model_sources())


@asynccontextmanager
async def serve_chat(adapters: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    """`starter/chat` twice in one engine, as `tiny` and as `quick`, which guesses ahead."""
    files, pipeline = find_chat(), TextGeneration()
    site = open_site(load_plugins(), Device(), SiteSettings(cache_bytes=1 << 29))
    served, programs = [], {}
    options = {**polymux_starter.CHAT.options, "adapters": adapters}
    options.pop("deterministic", None)
    for name, guesses in (("tiny", 0), ("quick", 6)):
        programs[name] = pipeline.load(files, site, {**options, "speculation": guesses})
    engine = LocalEngine(programs, site)
    for name in programs:
        served.append(Served(name, tuple(pipeline.tasks), pipeline.front(files, options), engine))
    service = Service(served)
    await service.start()
    await service.wait_ready()
    try:
        async with httpx.AsyncClient(
            transport=httpx.ASGITransport(create_app(service)), base_url="http://chat", timeout=600
        ) as http:
            yield http
    finally:
        await service.stop()


@pytest.mark.slow
async def test_every_pair_of_features_on_the_chat_starter(tmp_path: Path) -> None:
    """But for thoughts, which this model does not have. Its sums are exact, so answers are the same in any company."""
    model = AutoModelForCausalLM.from_pretrained(find_chat().folder)
    adapters = {
        name: str(write_adapter(tmp_path / name, model, rank=2, seed=seed, strength=0.02))
        for seed, name in enumerate(("calm", "loud"))
    }
    requests = [each | {"reasoning": None} for each in cover_pairs()]
    bodies = [make_body(features, number, tokens=24) for number, features in enumerate(requests)]
    async with serve_chat(adapters) as http:
        await check_matrix(http, requests, bodies)


def test_the_page_of_features_is_fresh() -> None:
    assert PAGE.read_text() == write_page(list(cover_pairs())), (
        "python -m polymux.core.testing.features > docs/features.md"
    )


def test_every_pair_of_values_is_covered() -> None:
    requests = list(cover_pairs())
    for one, two in itertools.combinations(FEATURES, 2):
        wanted = set(itertools.product(FEATURES[one], FEATURES[two]))
        assert {(each[one], each[two]) for each in requests} == wanted
