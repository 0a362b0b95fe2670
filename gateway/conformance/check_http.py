"""Over HTTP a plugin's tasks have what ours have, and its pages and middleware leave the rest alone."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import pytest
from starlette.routing import Route

from polymux.core.plugins import Plugin, Plugins
from polymux.core.service import Service
from polymux.core.testing.service import FakeService
from polymux.core.vocabulary import Task
from polymux.gateway.testing import open_gateway

if TYPE_CHECKING:
    from polymux.core.testing.conformance.bench import Bench

Visit = Callable[[httpx.AsyncClient], Coroutine[Any, Any, None]]


def visit(service: Service | FakeService, plugins: Plugins, do: Visit) -> None:
    async def go() -> None:
        async with open_gateway(service, plugins) as client:  # type: ignore[arg-type]
            await do(client)

    asyncio.run(go())


def own_tasks(record: Plugin, plugins: Plugins) -> list[Task]:
    tasks = [task for plugin, values in plugins.answers("tasks") if plugin is record for task in values]
    return [task for task in tasks if task.route is not None]


async def send(client: httpx.AsyncClient, task: Task, ask: msgspec.Struct) -> httpx.Response:
    route = task.route
    assert route is not None
    fields = {**json.loads(msgspec.json.encode(ask)), "model": "m"}
    if route.method.upper() == "GET":
        return await client.get(route.path, params=fields)
    if route.upload is None:
        return await client.post(route.path, json=fields)
    path = fields.pop(route.upload)
    with open(path, "rb") as file:
        data = {name: value for name, value in fields.items() if value is not None}
        return await client.post(route.path, data=data, files={route.upload: ("file", file.read())})


def test_its_tasks_are_answered_documented_and_counted(bench: Bench, record: Plugin, plugins: Plugins) -> None:
    tasks = [task for task in own_tasks(record, plugins) if task.name in bench.pipeline.tasks]
    if not tasks:
        pytest.skip("it adds no route of its own")
    from polymux.core.testing.local import LocalModel, open_local

    service = open_local(plugins, [LocalModel("m", bench.folder, bench.example.pipeline, bench.example.options)])

    async def do(client: httpx.AsyncClient) -> None:
        paths = (await client.get("/openapi.json")).json()["paths"]
        for task in tasks:
            assert task.route is not None
            assert task.route.path in paths and task.route.path in (await client.get("/docs")).text
            for ask in bench.example.asks[task.name]:
                answer = await send(client, task, ask)
                assert answer.status_code == 200, answer.text
                if task.route.stream == "sse":
                    assert answer.text.endswith("data: [DONE]\n\n")
            for ask in bench.example.refused.get(task.name, ()):
                answer = await send(client, task, ask)
                assert 400 <= answer.status_code < 500, answer.text
                assert answer.json()["error"]["param"], answer.text
            counted = f'polymux_e2e_request_latency_seconds_count{{model="m",task="{task.name}"}}'
            assert counted in (await client.get("/metrics")).text
            unknown = await client.request(task.route.method, task.route.path, json={"model": "m", "no_such_field": 1})
            assert 400 <= unknown.status_code < 500

    visit(service, plugins, do)
    assert record.status == "enabled", str(record.fault)


def test_its_pages_answer(record: Plugin, plugins: Plugins) -> None:
    routes = [route for plugin, values in plugins.answers("routes") if plugin is record for route in values]
    plain = [route for route in routes if isinstance(route, Route) and "{" not in route.path]
    if not plain:
        pytest.skip("it adds no plain route")

    async def do(client: httpx.AsyncClient) -> None:
        for route in plain:
            for method in sorted((route.methods or {"GET"}) - {"HEAD"}):
                answer = await client.request(method, route.path)
                assert answer.status_code < 500, f"{method} {route.path}: {answer.text}"
                assert answer.status_code != 404, f"{route.path} is not reached: another route has it"

    visit(FakeService(), plugins, do)


def test_its_middleware_lets_requests_pass(record: Plugin, plugins: Plugins) -> None:
    if "middleware" not in record.hooks:
        pytest.skip("it brings no middleware")

    async def do(client: httpx.AsyncClient) -> None:
        assert (await client.get("/livez")).status_code == 200
        body = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}
        whole = await client.post("/v1/chat/completions", json=body)
        assert whole.status_code == 200 and whole.json()["choices"], whole.text
        streamed = await client.post("/v1/chat/completions", json={**body, "stream": True})
        assert streamed.text.endswith("data: [DONE]\n\n"), "it holds up or cuts a stream"
        assert (await client.post("/v1/chat/completions", json={})).status_code == 400

    visit(FakeService(), plugins, do)
    assert record.status == "enabled", str(record.fault)


def test_it_is_listed(record: Plugin, plugins: Plugins) -> None:
    async def do(client: httpx.AsyncClient) -> None:
        cards = {card["name"]: card for card in (await client.get("/v1/plugins")).json()["data"]}
        assert cards[record.name]["status"] == "enabled", cards[record.name]["reason"]

    visit(FakeService(), plugins, do)
