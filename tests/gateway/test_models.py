"""The list of models, the probes' neighbours, and the documents about the API."""

from __future__ import annotations

from html.parser import HTMLParser

import httpx
import pytest

from polymux.core.testing.service import FakeServed, FakeService

pytestmark = pytest.mark.anyio


@pytest.fixture
def service() -> FakeService:
    served = FakeServed("starter/chat", ("chat",), ("gpt-4o-mini",), {"context_length": 8192})
    return FakeService(models=(served,))


async def test_names_and_aliases_with_facts(client: httpx.AsyncClient) -> None:
    body = (await client.get("/v1/models")).json()
    assert body["object"] == "list"
    assert [(card["id"], card.get("alias_of")) for card in body["data"]] == [
        ("starter/chat", None),
        ("gpt-4o-mini", "starter/chat"),
    ]
    assert all(card["facts"] == {"context_length": 8192} for card in body["data"])
    assert all(card["object"] == "model" and card["created"] > 0 for card in body["data"])


@pytest.mark.parametrize("name", ["starter/chat", "starter%2Fchat", "gpt-4o-mini"])
async def test_one_model_by_any_name(client: httpx.AsyncClient, name: str) -> None:
    card = (await client.get(f"/v1/models/{name}")).json()
    assert card["facts"]["context_length"] == 8192


async def test_a_model_that_is_not_served(client: httpx.AsyncClient) -> None:
    answer = await client.get("/v1/models/nope")
    assert answer.status_code == 404
    assert "starter/chat" in answer.json()["error"]["message"]


async def test_a_task_that_the_model_does_not_serve(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/embeddings", json={"model": "starter/chat", "input": "a"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "model"


async def test_openapi_describes_every_path(client: httpx.AsyncClient) -> None:
    document = (await client.get("/openapi.json")).json()
    assert document["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/models", "/livez", "/metrics"} <= set(
        document["paths"]
    )
    temperature = document["components"]["schemas"]["ChatRequest"]["properties"]["temperature"]
    assert {"type": "number", "minimum": 0, "maximum": 2} in temperature["anyOf"]
    assert_references_resolve(document, document)
    names = [each["operationId"] for path in document["paths"].values() for each in path.values()]
    assert len(set(names)) == len(names)
    assert all(name.isidentifier() for name in names)


def assert_references_resolve(value: object, document: dict[str, object]) -> None:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            assert value["$ref"].rpartition("/")[2] in document["components"]["schemas"]  # type: ignore[index]
        for each in value.values():
            assert_references_resolve(each, document)
    elif isinstance(value, list):
        for each in value:
            assert_references_resolve(each, document)


class Links(HTMLParser):
    """What a page would fetch or run."""

    def __init__(self) -> None:
        super().__init__()
        self.outside: list[str] = []
        self.anchors: set[str] = set()
        self.targets: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("src", "href") and value and not value.startswith(("#", "/")):
                self.outside.append(value)
            if name == "href" and value and value.startswith("#"):
                self.targets.add(value[1:])
            if name == "id" and value:
                self.anchors.add(value)


async def test_docs_work_offline(client: httpx.AsyncClient) -> None:
    answer = await client.get("/docs")
    assert answer.headers["content-type"].startswith("text/html")
    links = Links()
    links.feed(answer.text)
    assert links.outside == []
    assert links.targets <= links.anchors
    assert "<script" not in answer.text
    for word in ("/v1/chat/completions", "temperature", "min_p", "ChatCompletionChunk"):
        assert word in answer.text
