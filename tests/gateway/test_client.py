"""The official OpenAI client, unmodified, against a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from polymux.core.errors import EngineDied
from polymux.core.tasks import TextDelta
from polymux.core.testing.service import FakeService

pytestmark = pytest.mark.anyio

ASKED: dict[str, Any] = {"model": "gpt-stub", "messages": [{"role": "user", "content": "hi"}]}


@pytest.fixture
async def official(service: FakeService, serving: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    async with (
        serving(service) as running,
        openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0) as client,
    ):
        yield client


async def test_chat(official: openai.AsyncOpenAI) -> None:
    answer = await official.chat.completions.create(**ASKED, logprobs=True, top_logprobs=1)
    assert answer.choices[0].message.content == "Hello, this is a stub."
    assert answer.choices[0].logprobs is not None
    assert answer.usage is not None
    assert answer.receipt["launches"] == 7  # type: ignore[attr-defined]
    assert answer._request_id
    again = [*ASKED["messages"], answer.choices[0].message, {"role": "user", "content": "more"}]
    assert (await official.chat.completions.create(model="stub", messages=again)).choices


async def test_chat_stream(official: openai.AsyncOpenAI) -> None:
    stream = await official.chat.completions.create(**ASKED, stream=True, stream_options={"include_usage": True})
    chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == "Hello, this is a stub."
    assert chunks[-1].usage is not None
    assert chunks[-1].receipt["launches"] == 7  # type: ignore[attr-defined]


async def test_chat_stream_helper(official: openai.AsyncOpenAI) -> None:
    """The client's own accumulator understands the chunks."""
    async with official.chat.completions.stream(**ASKED) as stream:
        final = await stream.get_final_completion()
    assert final.choices[0].message.content == "Hello, this is a stub."
    assert final.choices[0].finish_reason == "stop"


async def test_completions(official: openai.AsyncOpenAI) -> None:
    answer = await official.completions.create(model="stub", prompt=[[1, 2]], logprobs=0, max_tokens=2)
    assert answer.choices[0].text == "Hello,"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.tokens == ["Hello", ","]


async def test_embeddings_default_to_base64_in_this_client(official: openai.AsyncOpenAI) -> None:
    answer = await official.embeddings.create(model="stub", input=["a", "bc"], dimensions=2)
    assert [item.embedding for item in answer.data] == [[1.0, 2.0], [2.0, 3.0]]


async def test_models(official: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in official.models.list()] == ["stub", "gpt-stub"]
    assert (await official.models.retrieve("gpt-stub")).id == "gpt-stub"


async def test_errors_become_the_clients_own(official: openai.AsyncOpenAI, service: FakeService) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        await official.chat.completions.create(**{**ASKED, "model": "nope"})
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.BadRequestError) as bad:
        await official.chat.completions.create(**ASKED, temperature=9)
    assert bad.value.param == "temperature"

    async def dying(served: Any, task: str, ask: Any) -> Any:
        yield TextDelta(0, "half")
        raise EngineDied("the engine went away")

    service.script = dying
    stream = await official.chat.completions.create(**ASKED, stream=True)
    with pytest.raises(openai.APIError, match="went away"):
        async for _ in stream:
            pass
