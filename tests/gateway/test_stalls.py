"""No request, however large, holds the event loop for long: others are answered meanwhile.

Measured in processor time of this thread, so that a busy machine does not fail the test.
"""

from __future__ import annotations

import asyncio
import json
import struct
import time
from typing import Any

import httpx
import pytest

from polymux.core.tasks import ChoiceEnded, Done, Embed, TextDelta, TokenLogprob, Vector
from polymux.core.testing.service import FakeService
from polymux.core.vocabulary import Receipt, Usage

pytestmark = pytest.mark.anyio

LIMIT = 0.15
"""Seconds. The promise is 50 ms on an idle machine; processor time doubles and more on a shared one."""


class Stalls:
    """The longest time that the loop was away from a task that wants it always."""

    def __init__(self) -> None:
        self.longest = 0.0

    async def __aenter__(self) -> Stalls:
        self.task = asyncio.create_task(self._watch())
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.task.cancel()

    async def _watch(self) -> None:
        while True:
            begin = time.thread_time()
            await asyncio.sleep(0)
            self.longest = max(self.longest, time.thread_time() - begin)


async def test_many_embeddings_of_many_numbers(client: httpx.AsyncClient, service: FakeService) -> None:
    vector = struct.pack("<1024f", *(index / 7 for index in range(1024)))

    async def embed(served: Any, task: str, ask: Embed) -> Any:
        for index in range(len(ask.inputs)):
            yield Vector(index, vector)
        yield Done(Usage(1), Receipt())

    service.script = embed
    async with Stalls() as stalls:
        answer = await client.post("/v1/embeddings", json={"model": "stub", "input": ["a"] * 1000})
        assert answer.status_code == 200
    assert stalls.longest < LIMIT


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_many_logprobs(client: httpx.AsyncClient, service: FakeService, path: str) -> None:
    token = TokenLogprob("word", -1.0, b"word", [TokenLogprob(f"w{rank}", -2.0, b"w") for rank in range(10)])

    async def long(served: Any, task: str, ask: Any) -> Any:
        for _ in range(4000):
            yield TextDelta(0, "word", [token])
        yield ChoiceEnded(0, "stop")
        yield Done(Usage(1, 4000), Receipt())

    service.script = long
    asked = (
        {"prompt": "a", "logprobs": 10}
        if "chat" not in path
        else {
            "messages": [{"role": "user", "content": "a"}],
            "logprobs": True,
            "top_logprobs": 10,
        }
    )
    async with Stalls() as stalls:
        assert (await client.post(path, json={"model": "stub", **asked})).status_code == 200
    assert stalls.longest < LIMIT


LARGE = {
    "token ids": json.dumps({"model": "stub", "prompt": [1234] * 690_000}),
    "lists of token ids": json.dumps({"model": "stub", "prompt": [[1] * 500] * 2000}),
    "text": json.dumps({"model": "stub", "prompt": "word " * 800_000}),
    "objects": json.dumps({"model": "stub", "prompt": [{}] * 99_000}),
    "unknown fields": json.dumps({"model": "stub", **{f"field {index}": 1 for index in range(200_000)}}),
}


@pytest.mark.parametrize("body", LARGE.values(), ids=LARGE.keys())
async def test_large_bodies(client: httpx.AsyncClient, body: str) -> None:
    async with Stalls() as stalls:
        answer = await client.post("/v1/completions", content=body, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400)
    assert stalls.longest < LIMIT, answer.status_code
