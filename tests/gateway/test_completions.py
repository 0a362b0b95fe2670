"""Completions: prompts of every shape, and this endpoint's own logprobs."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from polymux.core.tasks import ChoiceEnded, Complete, Done, TextDelta, TokenLogprob
from polymux.core.testing.service import FakeService
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.schemas.completions import Completion

pytestmark = pytest.mark.anyio

PATH = "/v1/completions"
BODY = {"model": "stub", "prompt": "hi"}


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2, 3], [[1, 2, 3]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
    ],
)
async def test_prompts_of_every_shape(
    client: httpx.AsyncClient, service: FakeService, prompt: Any, prompts: Any
) -> None:
    answer = await client.post(PATH, json={**BODY, "prompt": prompt, "n": 2})
    assert service.opened[0].ask.prompts == prompts
    choices = Completion.model_validate_json(answer.content).choices
    assert [choice.index for choice in choices] == list(range(2 * len(prompts)))


async def test_defaults_are_the_protocols(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post(PATH, json=BODY)
    assert service.opened[0].ask == Complete(prompts=["hi"], max_tokens=16)


async def test_echo_reaches_the_task(client: httpx.AsyncClient, service: FakeService) -> None:
    await client.post(PATH, json={**BODY, "echo": True, "max_tokens": 1})
    assert service.opened[0].ask.echo is True


@pytest.mark.parametrize("top", [0, 2])
async def test_logprobs_in_completions_own_shape(client: httpx.AsyncClient, top: int) -> None:
    """imp 1589: they came in chat's shape. 0 means the chosen token only."""
    asked = {**BODY, "logprobs": top, "max_tokens": 3}
    whole = (await client.post(PATH, json=asked)).json()["choices"][0]
    logprobs = whole["logprobs"]
    assert logprobs["tokens"] == ["Hello", ",", " this"]
    assert logprobs["text_offset"] == [0, 5, 6]
    assert logprobs["token_logprobs"] == [-0.5] * 3
    assert [len(each) for each in logprobs["top_logprobs"]] == [max(1, top)] * 3
    text = (await client.post(PATH, json={**asked, "stream": True})).text
    frames = [json.loads(frame[6:]) for frame in text.split("\n\n") if frame and "[DONE]" not in frame]
    streamed = [frame["choices"][0]["logprobs"] for frame in frames if frame["choices"][0]["logprobs"]]
    for key, values in logprobs.items():
        assert [value for each in streamed for value in each[key]] == values
    assert "".join(frame["choices"][0]["text"] for frame in frames) == whole["text"]


async def test_a_character_split_over_tokens_keeps_offsets_true(
    client: httpx.AsyncClient, service: FakeService
) -> None:
    """Parts of a character are named by their bytes; offsets count complete characters."""
    parts = [b"\xe2\x82", b"\xac", b"!"]

    async def split(served: Any, task: str, ask: Complete) -> Any:
        yield TextDelta(0, "", [TokenLogprob("\ufffd", -1.0, parts[0])])
        yield TextDelta(0, "€!", [TokenLogprob("\ufffd", -1.0, parts[1]), TokenLogprob("!", -1.0, parts[2])])
        yield ChoiceEnded(0, "stop")
        yield Done(Usage(1, 3), Receipt())

    service.script = split
    choice = (await client.post(PATH, json={**BODY, "logprobs": 0})).json()["choices"][0]
    assert choice["text"] == "€!"
    assert choice["logprobs"]["tokens"] == ["bytes:\\xe2\\x82", "bytes:\\xac", "!"]
    assert choice["logprobs"]["text_offset"] == [0, 0, 1]


async def test_first_echoed_token_has_no_logprob(client: httpx.AsyncClient, service: FakeService) -> None:
    async def echoing(served: Any, task: str, ask: Complete) -> Any:
        tokens = [TokenLogprob("hi", float("nan"), b"hi"), TokenLogprob("!", -1.0, b"!")]
        yield TextDelta(0, "hi!", tokens)
        yield ChoiceEnded(0, "length")
        yield Done(Usage(1, 1), Receipt())

    service.script = echoing
    logprobs = (await client.post(PATH, json={**BODY, "echo": True, "logprobs": 1})).json()["choices"][0]["logprobs"]
    assert logprobs["token_logprobs"] == [None, -1.0]
    assert logprobs["top_logprobs"] == [None, {"!": -1.0}]
