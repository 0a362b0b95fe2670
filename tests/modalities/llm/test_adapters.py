"""Adapters through the gateway: `model:adapter` is a model of its own in the list, answered by the same engine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

from polymux.core.assembly import locate_adapters
from polymux.core.config import read_config
from polymux.core.errors import ConfigError, ModelError
from polymux.core.plugins import load_plugins
from polymux.core.testing.adapting import write_adapter
from polymux.core.testing.tiny import build, tiny_llama

pytestmark = pytest.mark.anyio


@pytest.fixture
def adapters(tmp_path: Path) -> dict[str, str]:
    model = build(lambda: tiny_llama(64))
    return {name: str(write_adapter(tmp_path / name, model, seed=seed)) for seed, name in enumerate(("calm", "loud"))}


async def complete(http: Any, model: str, **options: Any) -> Any:
    body = {"model": model, "prompt": "Hello there", "temperature": 0, "max_tokens": 12, "logprobs": 0, **options}
    return await http.post("/v1/completions", json=body)


async def test_each_adapter_is_a_model(serve: Any, adapters: dict[str, str]) -> None:
    async with serve(adapters=adapters) as http:
        listed = (await http.get("/v1/models")).json()["data"]
        assert [card["id"] for card in listed] == ["tiny", "tiny:calm", "tiny:loud"]
        assert listed[0]["facts"]["adapters"] == ["calm", "loud"]
        assert listed[1]["facts"]["adapter"] == "calm" and listed[1]["facts"]["variant_of"] == "tiny"
        names = ["tiny", "tiny:calm", "tiny:loud"]
        first = await asyncio.gather(*(complete(http, name) for name in names))
        again = await asyncio.gather(*(complete(http, name) for name in reversed(names)))
    texts = [answer.json()["choices"][0]["text"] for answer in first]
    assert len(set(texts)) == 3
    assert texts[::-1] == [answer.json()["choices"][0]["text"] for answer in again]
    assert [answer.json()["model"] for answer in first] == names


async def test_an_unknown_adapter_is_an_unknown_model(serve: Any, adapters: dict[str, str]) -> None:
    async with serve(adapters=adapters) as http:
        for name in ("tiny:none", "tiny:", "tiny:calm:loud", ":calm"):
            answer = await complete(http, name)
            assert answer.status_code == 404
            assert "tiny:calm" in answer.json()["error"]["message"]


def test_references_become_folders_when_a_service_is_put_together(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "polymux.toml").write_text(
        '[models.chat]\nreference = "starter/chat"\noptions = {adapters = {mine = "./mine", far = "hf:org/far"}}\n'
    )
    [model] = read_config(tmp_path / "polymux.toml", {}).settings().models
    assert model.options["adapters"] == {"mine": str(tmp_path / "mine"), "far": "hf:org/far"}
    plugins = load_plugins()
    assert locate_adapters("chat", {"mine": str(tmp_path / "mine")}, plugins, print) == {"mine": str(tmp_path / "mine")}
    with pytest.raises(ModelError):
        locate_adapters("chat", {"mine": str(tmp_path / "nothing")}, plugins, print)
    for wrong in ({"a:b": "x"}, {"a": 3}, ["a"]):
        with pytest.raises(ConfigError):
            locate_adapters("chat", wrong, plugins, print)


async def test_the_official_clients_reach_adapters(serve: Any, adapters: dict[str, str]) -> None:
    async with serve(adapters=adapters, speculation=4, library=httpx2) as http:
        client = anthropic.AsyncAnthropic(api_key="none", base_url="http://tiny", http_client=http, max_retries=0)
        ask: Any = {"max_tokens": 8, "messages": [{"role": "user", "content": "Hello"}], "extra_body": {"seed": 3}}
        whole = await client.messages.create(model="quick:calm", **ask)
        async with client.messages.stream(model="tiny:calm", **ask) as stream:
            assert (await stream.get_final_message()).content[0].text == whole.content[0].text
    async with serve(adapters=adapters, speculation=4) as http:
        official = openai.AsyncOpenAI(api_key="none", base_url="http://tiny/v1", http_client=http, max_retries=0)
        names = [card.id async for card in official.models.list()]
        assert names == ["tiny", "tiny:calm", "tiny:loud", "quick", "quick:calm", "quick:loud"]
        options: Any = {"messages": [{"role": "user", "content": "Hello"}], "n": 2, "seed": 3, "max_tokens": 8}
        chat = await official.chat.completions.create(model="quick:loud", logprobs=True, **options)
        told = ["", ""]
        async for chunk in await official.chat.completions.create(model="tiny:loud", stream=True, **options):
            for choice in chunk.choices:
                told[choice.index] += choice.delta.content or ""
        assert told == [choice.message.content for choice in chat.choices]
        assert all(len(choice.logprobs.content) == 8 for choice in chat.choices)
