"""Uploads and the client: a stranger's task is reached with a file, from Python, with no code of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from pydantic import BaseModel

from polymux import Client, PolymuxError
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.tasks import Done
from polymux.core.testing.plugins import make_plugin, make_plugins
from polymux.core.testing.service import FakeServed, FakeService
from polymux.core.vocabulary import Receipt, Route, Task, Usage
from polymux.gateway.app import create_app


class Weigh(msgspec.Struct):
    file: str
    scale: int = 1
    tags: list[str] = []


class WeighRequest(BaseModel):
    model: str
    scale: int = 1
    tags: list[str] = []


class Weighed(msgspec.Struct):
    size: int
    tags: list[str]


class Piece(msgspec.Struct):
    data: bytes


async def weigh(served: Any, task: str, ask: Weigh) -> AsyncIterator[msgspec.Struct]:
    content = Path(ask.file).read_bytes()
    if content == b"refuse":
        raise InvalidRequest("not that one", param="file")
    for part in content.split(b" "):
        yield Piece(part) if task == "echo" else Weighed(len(part) * ask.scale, ask.tags)
        if part == b"break":
            raise InternalError("it broke on the way")
    yield Done(Usage(), Receipt())


TASKS = [
    Task("weigh", Weigh, (Weighed, Done), Route("POST", "/x/weigh", WeighRequest, upload="file", summary="Weigh it")),
    Task("parts", Weigh, (Weighed, Done), Route("POST", "/x/parts", WeighRequest, stream="sse", upload="file")),
    Task("echo", Weigh, (Piece, Done), Route("POST", "/x/echo", stream="bytes", upload="file")),
]


class Bridge(httpx.BaseTransport):
    """The synchronous client's way into an application of this process."""

    def __init__(self, app: Any) -> None:
        self.inner = httpx.ASGITransport(app)

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        async def ask() -> httpx.Response:
            content = request.read()
            again = httpx.Request(request.method, request.url, headers=request.headers, content=content)
            response = await self.inner.handle_async_request(again)
            return httpx.Response(response.status_code, headers=response.headers, content=await response.aread())

        return asyncio.run(ask())


@pytest.fixture
def client() -> Client:
    service = FakeService(models=(FakeServed("m", ("weigh", "parts", "echo")),), script=weigh)
    return Client(
        "http://gateway", transport=Bridge(create_app(service, plugins=make_plugins(make_plugin("p", tasks=TASKS))))
    )


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def write(content: bytes) -> Path:
        path = tmp_path / "file.bin"
        path.write_bytes(content)
        return path

    return write


def test_a_file_arrives_as_a_path(client: Client, write: Any) -> None:
    answer = client.ask("weigh", model="m", scale=2, tags=["a", "b"], upload=write(b"12345"))
    assert (answer["size"], answer["tags"]) == (10, ["a", "b"])
    assert "receipt" in answer


def test_streams_arrive_in_frames_and_bytes(client: Client, write: Any) -> None:
    frames = list(client.stream("parts", model="m", upload=write(b"a bcd")))
    assert [frame["size"] for frame in frames[:-1]] == [1, 3] and "usage" in frames[-1]
    assert b"".join(client.read("echo", model="m", upload=write(b"la li"))) == b"lali"


def test_the_client_knows_what_there_is(client: Client, write: Any) -> None:
    assert [(route.task, route.stream, route.upload) for route in client.tasks()] == [
        ("echo", "bytes", "file"),
        ("parts", "sse", "file"),
        ("weigh", "none", "file"),
    ]
    assert client.tasks()[2].summary == "Weigh it"
    with pytest.raises(InvalidRequest, match="plugins brought: echo, parts, weigh"):
        client.ask("wiegh", model="m")
    with pytest.raises(InvalidRequest, match="'parts' streams events: use `stream`"):
        client.ask("parts", model="m", upload=write(b""))
    with pytest.raises(InvalidRequest, match="takes a file"):
        client.ask("weigh", model="m")


@pytest.mark.parametrize(
    ("content", "fields", "status", "param"),
    [
        (b"refuse", {"model": "m"}, 400, "file"),
        (b"a", {"model": "nope"}, 404, "model"),
        (b"a", {"model": "m", "scale": "x"}, 400, "scale"),
        (b"a", {"model": "m", "colour": "red"}, 400, "colour"),
    ],
)
def test_errors_keep_status_and_param(
    client: Client, write: Any, content: bytes, fields: dict[str, Any], status: int, param: str
) -> None:
    with pytest.raises(PolymuxError) as caught:
        client.ask("weigh", upload=write(content), **fields)
    assert (caught.value.status, caught.value.param) == (status, param)


def test_an_error_in_a_stream_is_raised(client: Client, write: Any) -> None:
    frames = client.stream("parts", model="m", upload=write(b"ok break more"))
    assert next(frames)["size"] == 2
    with pytest.raises(PolymuxError, match="it broke on the way"):
        list(frames)


def test_a_form_without_its_file_and_a_body_that_is_no_form(client: Client) -> None:
    http = client._http
    missing = http.post("/x/weigh", data={"model": "m"}, files={"other": ("x", b"1")})
    assert (missing.status_code, missing.json()["error"]["param"]) == (400, "other")
    assert http.post("/x/weigh", json={"model": "m"}).status_code == 415
    text = http.post("/x/weigh", files={"model": (None, "m"), "file": (None, "text")})
    assert (text.status_code, text.json()["error"]["code"]) == (400, "missing_required_parameter")
    document = http.get("/openapi.json").json()
    body = document["paths"]["/x/weigh"]["post"]["requestBody"]["content"]["multipart/form-data"]["schema"]
    form = document["components"]["schemas"][body["$ref"].rpartition("/")[2]]
    assert form["properties"]["file"]["format"] == "binary"
