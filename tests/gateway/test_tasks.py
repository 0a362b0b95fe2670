"""A stranger's task, declared as data, is served with the errors, limits, metrics and documents of our own."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel, Field

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Done
from polymux.core.testing.plugins import make_plugin, make_plugins
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Route, Task, Usage
from polymux.gateway.app import create_app

pytestmark = pytest.mark.anyio


class CountWords(msgspec.Struct):
    text: str
    scale: int = 1


class Counted(msgspec.Struct):
    words: int


class Sound(msgspec.Struct):
    data: bytes
    media_type: str = "audio/raw"


class CountRequest(BaseModel):
    model: str
    text: str = Field(min_length=1)
    scale: int = Field(1, ge=1, le=10)


class CountResponse(BaseModel):
    words: int


async def count(served: Any, task: str, ask: CountWords) -> AsyncIterator[msgspec.Struct]:
    if ask.text == "fail":
        raise InvalidRequest("that word is refused", param="text")
    if task == "hum":
        for word in ask.text.split():
            yield Sound(word.encode())
    elif task == "tick":
        for index in range(len(ask.text.split())):
            yield Counted(index)
    else:
        yield Counted(len(ask.text.split()) * ask.scale)
    yield Done(Usage(seconds=1.5), Receipt(launches=1))


def make_task(name: str = "count", **route: Any) -> Task:
    values: dict[str, Any] = {
        "method": "POST",
        "path": f"/x/{name}",
        "request": CountRequest,
        "response": CountResponse,
    }
    return Task(name, CountWords, (Counted, Done), Route(**{**values, **route}))


@asynccontextmanager
async def talk(*tasks: Task) -> AsyncIterator[httpx.AsyncClient]:
    service = FakeService(models=(FakeServed("m", tuple(task.name for task in tasks)),), script=count)
    plugins = make_plugins(*(make_plugin(f"{task.name}-plugin", tasks=[task]) for task in tasks))
    app = create_app(service, plugins=plugins)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://gateway") as client:
        yield client


async def test_whole() -> None:
    async with talk(make_task()) as client:
        answer = await client.post("/x/count", json={"model": "m", "text": "a b c", "scale": 2})
        assert answer.json() == {"words": 6, "usage": {"seconds": 1.5}, "receipt": {"launches": 1}}
        assert (
            'polymux_request_generation_tokens_count{model="m",task="count"} 1.0' in (await client.get("/metrics")).text
        )


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"text": "a"}, "model"),
        ({"model": "m"}, "text"),
        ({"model": "m", "text": ""}, "text"),
        ({"model": "m", "text": "a", "scale": 99}, "scale"),
        ({"model": "m", "text": "a", "volume": 3}, "volume"),
        ({"model": "m", "text": "fail"}, "text"),
        ([], None),
    ],
)
async def test_bad_input_is_named(body: Any, param: str | None) -> None:
    async with talk(make_task()) as client:
        answer = await client.post("/x/count", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param
        assert (await client.post("/x/count", json={"model": "nope", "text": "a"})).status_code == 404


async def test_events() -> None:
    async with talk(make_task("tick", stream="sse")) as client:
        answer = await client.post("/x/tick", json={"model": "m", "text": "a b"})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.text.split("\n\n") == [
            'data: {"words":0}',
            'data: {"words":1}',
            'data: {"usage":{"seconds":1.5},"receipt":{"launches":1}}',
            "data: [DONE]",
            "",
        ]


async def test_bytes() -> None:
    async with talk(make_task("hum", stream="bytes", response=None)) as client:
        answer = await client.post("/x/hum", json={"model": "m", "text": "la li"})
        assert answer.headers["content-type"] == "audio/raw"
        assert answer.content == b"lali"


async def test_get_takes_the_query() -> None:
    async with talk(make_task(method="GET")) as client:
        assert (await client.get("/x/count?model=m&text=a+b&scale=3")).json()["words"] == 6
        assert (await client.get("/x/count?model=m&text=a&scale=x")).status_code == 400


async def test_without_a_request_model_the_ask_is_the_schema() -> None:
    async with talk(make_task(request=None)) as client:
        assert (await client.post("/x/count", json={"model": "m", "text": "a b"})).json()["words"] == 2
        wrong = await client.post("/x/count", json={"model": "m", "text": 5})
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "text")
        assert (await client.post("/x/count", json={"model": "m"})).status_code == 400


async def test_it_is_in_the_documents() -> None:
    async with talk(make_task()) as client:
        assert "/x/count" in (await client.get("/openapi.json")).json()["paths"]
        assert "/x/count" in (await client.get("/docs")).text


class NoModel(BaseModel):
    text: str


class TooMuch(CountRequest):
    colour: str = "red"


@pytest.mark.parametrize(
    "route",
    [
        {"path": "/v1/chat/completions"},
        {"path": "no-slash"},
        {"method": "BREW"},
        {"stream": "smoke"},
        {"request": NoModel},
        {"request": TooMuch},
        {"response": int},
    ],
)
async def test_a_route_that_cannot_be_mounted_costs_only_itself(route: dict[str, Any], caplog: Any) -> None:
    """The log says why; the plugin next to it is served."""
    async with talk(make_task("bad", **route), make_task("good")) as client:
        assert "task 'bad' is not served" in caplog.text
        assert (await client.post("/x/good", json={"model": "m", "text": "a b"})).json()["words"] == 2
        assert (await client.get("/openapi.json")).status_code == 200
        facts = {each["name"]: each for each in (await client.get("/v1/plugins")).json()["data"]}
        assert facts["bad-plugin"]["status"] == "failed"
        assert "plugin 'bad-plugin', tasks: bad" in facts["bad-plugin"]["reason"]
        assert facts["good-plugin"]["status"] == "enabled"
