"""Who may ask: keys, and the refusal to stand open to strangers."""

from __future__ import annotations

from typing import Any

import pytest

from polymux.core.errors import ConfigError
from polymux.core.testing.service import FakeService
from polymux.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio

BODY = {"model": "stub", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer wrong",
        "Basic first",
        "first",
        "Bearer firs",
        "Bearer first2",
        "Bearer \xff",
    ],
)
async def test_without_a_good_key_nothing_opens(service: FakeService, talking: Any, header: str | None) -> None:
    headers = {} if header is None else {"authorization": header.encode("latin-1")}
    async with talking(service, api_keys=("first", "second")) as client:
        for method, path in [
            ("POST", "/v1/chat/completions"),
            ("GET", "/v1/models"),
            ("GET", "/metrics"),
            ("GET", "/nothing"),
            ("GET", "//livez"),
            ("GET", "/livez/../v1/models"),
            ("GET", "/livez%2f..%2fv1/models"),
        ]:
            answer = await client.request(method, path, headers=headers, json=BODY if method == "POST" else None)
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
            assert answer.headers["www-authenticate"] == "Bearer"
    assert service.opened == []


@pytest.mark.parametrize("key", ["first", "second"])
async def test_every_key_opens(service: FakeService, talking: Any, key: str) -> None:
    async with talking(service, api_keys=("first", "second")) as client:
        headers = {"authorization": f"bearer {key}"}
        assert (await client.post("/v1/chat/completions", json=BODY, headers=headers)).status_code == 200


async def test_two_authorization_headers_are_none(service: FakeService, talking: Any) -> None:
    async with talking(service, api_keys=("first",)) as client:
        headers = [("authorization", "Bearer first"), ("authorization", "Bearer wrong")]
        assert (await client.get("/v1/models", headers=headers)).status_code == 401


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/docs", "/openapi.json"])
async def test_probes_and_pages_are_open(service: FakeService, talking: Any, path: str) -> None:
    async with talking(service, api_keys=("first",)) as client:
        assert (await client.get(path)).status_code == 200


async def test_no_cross_origin_by_default(service: FakeService, talking: Any) -> None:
    async with talking(service) as client:
        headers = {"origin": "http://evil", "access-control-request-method": "POST"}
        answer = await client.options("/v1/chat/completions", headers=headers)
        assert answer.status_code == 405
        assert not [name for name in answer.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_an_open_address_needs_a_key(host: str) -> None:
    with pytest.raises(ConfigError, match="without an API key"):
        GatewaySettings(host=host).check()
    GatewaySettings(host=host, api_keys=("k",)).check()
    GatewaySettings(host=host, insecure=True).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.8.8"])
def test_a_loopback_address_needs_none(host: str) -> None:
    GatewaySettings(host=host).check()


def test_an_empty_key_is_none() -> None:
    with pytest.raises(ConfigError, match="empty key"):
        GatewaySettings(api_keys=("",)).check()
