"""Every request has an id and one line in the log; the log never says what was said."""

from __future__ import annotations

import json
import logging
from typing import Any

import httpx
import pytest

from polymux.core.testing.service import FakeService

pytestmark = pytest.mark.anyio

PATH = "/v1/chat/completions"
BODY = {"model": "gpt-stub", "messages": [{"role": "user", "content": "a secret"}]}


async def test_request_id_in_and_out(client: httpx.AsyncClient, service: FakeService) -> None:
    answer = await client.post(PATH, json=BODY, headers={"x-request-id": "trace-1"})
    assert answer.headers["x-request-id"] == "trace-1"
    assert service.opened[0].request_id == "trace-1"


@pytest.mark.parametrize("bad", ["", "a b", "x" * 129, "a\tb", "é"])
async def test_request_id_that_is_no_token_is_replaced(client: httpx.AsyncClient, bad: str) -> None:
    """It ends in headers and logs: nothing may be smuggled through it."""
    answer = await client.get("/livez", headers={"x-request-id": bad.encode()})
    assert answer.headers["x-request-id"] != bad
    assert len(answer.headers["x-request-id"]) == 32


async def test_one_line_per_request(client: httpx.AsyncClient, caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "polymux.access"):
        await client.post(PATH, json=BODY, headers={"authorization": "Bearer k3y"})
        await client.post(PATH, json={**BODY, "model": "nope"})
    first, second = [json.loads(record.getMessage()) for record in caplog.records]
    assert first["status"] == 200
    assert (first["model"], first["task"], first["outcome"], first["output"]) == ("stub", "chat", "finished", 7)
    assert first["ms"] > 0
    assert second["status"] == 404
    assert "secret" not in caplog.text
    assert "k3y" not in caplog.text


async def test_metrics_do_not_grow_with_what_strangers_ask(client: httpx.AsyncClient) -> None:
    for number in range(30):
        await client.get(f"/made/up/{number}")
        await client.request(f"VERB{number}", "/livez")
        await client.post(PATH, json={**BODY, "model": f"made-up-{number}"})
    text = (await client.get("/metrics")).text
    assert "/made" not in text and "made-up" not in text
    assert "VERB" not in text
    assert len([line for line in text.splitlines() if line.startswith("polymux_http_requests_total")]) < 6


async def test_a_model_that_is_not_here_is_counted_under_its_requests_method(client: httpx.AsyncClient) -> None:
    await client.post(PATH, json={**BODY, "model": "nope"})
    text = (await client.get("/metrics")).text
    assert f'polymux_http_requests_total{{method="POST",route="{PATH}",status="404"}} 1.0' in text


async def test_metrics_count_tokens_and_engine_gauges(client: httpx.AsyncClient, service: FakeService) -> None:
    service.stats = {"kv_cache_usage_perc": 0.5, "odd-name": 1.0}
    await client.post(PATH, json=BODY)
    text = (await client.get("/metrics")).text
    for line in [
        'polymux_generation_tokens_total{model="stub",task="chat"} 7.0',
        'polymux_request_success_total{finished_reason="stop",model="stub",task="chat"} 1.0',
        'polymux_time_to_first_token_seconds_count{model="stub",task="chat"} 1.0',
        'polymux_inter_token_latency_seconds_count{model="stub",task="chat"}',
        'polymux_e2e_request_latency_seconds_count{model="stub",task="chat"} 1.0',
        "polymux_engine_kv_cache_usage_perc 0.5",
        "polymux_engine_odd_name 1.0",
    ]:
        assert line in text
