"""Chat answers: their shapes, whole and streamed, and what reaches the task."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from polymux.core.errors import EngineDied
from polymux.core.tasks import Chat, ChoiceEnded, Done, Sampling, TextDelta, TokenLogprob
from polymux.core.testing.service import FakeService
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.schemas.chat import ChatCompletion, ChatCompletionChunk

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


def read_frames(text: str) -> list[dict[str, Any]]:
    """The JSON frames of a stream that ends in exactly one [DONE]."""
    frames = [frame.removeprefix("data: ") for frame in text.split("\n\n") if frame]
    assert frames.count("[DONE]") == 1
    assert frames[-1] == "[DONE]"
    return [json.loads(frame) for frame in frames[:-1]]


async def stream(client: httpx.AsyncClient, **change: Any) -> list[dict[str, Any]]:
    answer = await client.post(PATH, json={**BODY, "stream": True, **change})
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_frames(answer.text)


async def test_whole_answer(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, json=BODY)
    body = ChatCompletion.model_validate_json(answer.content)
    assert answer.headers["content-type"] == "application/json"
    assert body.choices[0].message.content == "Hello, this is a stub."
    assert body.choices[0].finish_reason == "stop"
    assert body.usage.total_tokens == body.usage.prompt_tokens + body.usage.completion_tokens
    assert body.receipt.launches == 7


async def test_stream_false_is_no_stream(client: httpx.AsyncClient) -> None:
    """mini-sglang, litellm 25766: stream false was answered with server-sent events."""
    answer = await client.post(PATH, json={**BODY, "stream": False})
    assert answer.headers["content-type"] == "application/json"


async def test_deltas_joined_equal_the_whole(client: httpx.AsyncClient) -> None:
    whole = (await client.post(PATH, json=BODY)).json()["choices"][0]["message"]["content"]
    frames = await stream(client)
    for frame in frames:
        ChatCompletionChunk.model_validate(frame)
    assert "".join(frame["choices"][0]["delta"].get("content", "") for frame in frames) == whole
    assert frames[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert frames[-1]["choices"][0]["finish_reason"] == "stop"
    assert frames[-1]["receipt"]["launches"] == 7
    assert len({frame["id"] for frame in frames}) == 1


async def test_finish_reason_is_honest(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json={**BODY, "max_tokens": 2})).json()["choices"][0]["finish_reason"] == "length"
    frames = await stream(client, max_completion_tokens=2)
    assert [frame["choices"][0]["finish_reason"] for frame in frames] == [None, None, None, "length"]


@pytest.mark.parametrize("asked", [True, False, None])
async def test_usage_only_if_asked(client: httpx.AsyncClient, asked: bool | None) -> None:
    """vllm 7262, PR 36379: usage came in every chunk, or unasked."""
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    frames = await stream(client, **options)
    with_usage = [frame for frame in frames if "usage" in frame]
    if asked:
        assert with_usage == frames[-1:]
        assert frames[-1]["choices"] == []
        assert frames[-1]["usage"]["completion_tokens"] == 7
        assert frames[-1]["receipt"]
    else:
        assert with_usage == []
        assert all(frame["choices"] for frame in frames)


async def test_n_choices_each_with_its_own_end(client: httpx.AsyncClient) -> None:
    """vllm PR 11898, 52398, litellm 3276: choices were missing or mis-indexed in streams."""
    whole = (await client.post(PATH, json={**BODY, "n": 3})).json()["choices"]
    assert [choice["index"] for choice in whole] == [0, 1, 2]
    frames = await stream(client, n=3)
    ends = [frame["choices"][0] for frame in frames if frame["choices"][0]["finish_reason"]]
    assert sorted(end["index"] for end in ends) == [0, 1, 2]
    roles = [frame["choices"][0]["index"] for frame in frames if "role" in frame["choices"][0]["delta"]]
    assert sorted(roles) == [0, 1, 2]
    assert [("receipt" in frame) for frame in frames].count(True) == 1


async def test_choices_that_end_at_different_times(client: httpx.AsyncClient, service: FakeService) -> None:
    async def uneven(served: Any, task: str, ask: Chat) -> Any:
        yield ChoiceEnded(1, "stop")
        yield TextDelta(0, "a")
        yield TextDelta(0, "b")
        yield ChoiceEnded(0, "length")
        yield Done(Usage(1, 2), Receipt())

    service.script = uneven
    frames = await stream(client, n=2)
    assert [(f["choices"][0]["index"], f["choices"][0]["finish_reason"]) for f in frames] == [
        (1, None),
        (1, "stop"),
        (0, None),
        (0, None),
        (0, None),
        (0, "length"),
    ]


@pytest.mark.parametrize("top", [None, 0, 2])
async def test_logprobs_in_chats_own_shape(client: httpx.AsyncClient, top: int | None) -> None:
    """imp 1589, xinference PR 5270: 0 was treated as off. 0 means the chosen token only."""
    asked = {"logprobs": True, "max_tokens": 2} | ({} if top is None else {"top_logprobs": top})
    content = (await client.post(PATH, json={**BODY, **asked})).json()["choices"][0]["logprobs"]["content"]
    assert [each["token"] for each in content] == ["Hello", ","]
    assert bytes(content[0]["bytes"]).decode() == "Hello"
    assert [len(each["top_logprobs"]) for each in content] == [top or 0] * 2
    assert all(each["logprob"] <= 0 for each in content)
    streamed = [frame["choices"][0]["logprobs"] for frame in await stream(client, **asked)]
    assert [entry for each in streamed if each for entry in each["content"]] == content


async def test_no_logprobs_unless_asked(client: httpx.AsyncClient) -> None:
    assert (await client.post(PATH, json=BODY)).json()["choices"][0]["logprobs"] is None


async def test_logprob_that_is_not_finite_keeps_the_body_valid(client: httpx.AsyncClient, service: FakeService) -> None:
    async def infinite(served: Any, task: str, ask: Chat) -> Any:
        yield TextDelta(0, "x", [TokenLogprob("x", float("-inf"), b"x")])
        yield ChoiceEnded(0, "stop")
        yield Done(Usage(1, 1), Receipt())

    service.script = infinite
    answer = await client.post(PATH, json={**BODY, "logprobs": True})
    json.loads(answer.text, parse_constant=lambda name: pytest.fail(name))


async def test_every_field_reaches_the_task(client: httpx.AsyncClient, service: FakeService) -> None:
    """litellm 25766: parsed parameters were ignored."""
    await client.post(
        PATH,
        json={
            "model": "gpt-stub",
            "messages": [
                {"role": "system", "content": "be brief"},
                {
                    "role": "user",
                    "name": "ada",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
            ],
            "temperature": 0,
            "top_p": 0.5,
            "n": 2,
            "stop": ["x", "y"],
            "seed": 7,
            "presence_penalty": 1,
            "frequency_penalty": -1,
            "logit_bias": {"5": -100},
            "max_completion_tokens": 9,
            "logprobs": True,
            "top_logprobs": 3,
            "top_k": -1,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "ignore_eos": True,
            "stop_token_ids": [3],
            "chat_template_kwargs": {"enable_thinking": False},
        },
    )
    assert service.opened[0].served.name == "stub"
    assert service.opened[0].ask == Chat(
        messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "ab", "name": "ada"}],
        sampling=Sampling(
            temperature=0,
            top_p=0.5,
            top_k=0,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            repetition_penalty=1.1,
            logit_bias={5: -100},
            seed=7,
        ),
        n=2,
        max_tokens=9,
        stop=["x", "y"],
        stop_token_ids=[3],
        ignore_eos=True,
        logprobs=3,
        template_options={"enable_thinking": False},
    )


async def test_a_billion_tokens_may_be_asked_for(client: httpx.AsyncClient, service: FakeService) -> None:
    assert (await client.post(PATH, json={**BODY, "max_tokens": 10**9})).status_code == 200


@pytest.mark.parametrize("streamed", [True, False])
async def test_failure_before_the_first_token_has_its_status(
    client: httpx.AsyncClient, service: FakeService, streamed: bool
) -> None:
    """litellm 18756: it was sent as a 200 stream."""

    async def dying(served: Any, task: str, ask: Chat) -> Any:
        raise EngineDied("the engine went away")
        yield

    service.script = dying
    answer = await client.post(PATH, json={**BODY, "stream": streamed})
    assert answer.status_code == 503
    assert answer.headers["content-type"] == "application/json"
    assert int(answer.headers["retry-after"]) >= 1
    assert answer.json()["error"]["code"] == "engine_died"


async def test_failure_mid_stream_is_an_error_frame_then_done(client: httpx.AsyncClient, service: FakeService) -> None:
    """litellm 32086: it looked like an empty success."""

    async def dying(served: Any, task: str, ask: Chat) -> Any:
        yield TextDelta(0, "half a")
        raise EngineDied("the engine went away")

    service.script = dying
    answer = await client.post(PATH, json={**BODY, "stream": True})
    frames = read_frames(answer.text)
    assert frames[-1]["error"]["code"] == "engine_died"
    assert not any(frame.get("choices", [{}])[0].get("finish_reason") for frame in frames)
    metrics = (await client.get("/metrics")).text
    assert 'polymux_request_failure_total{code="engine_died",model="stub",task="chat"} 1.0' in metrics
    assert "polymux_request_success_total{" not in metrics
