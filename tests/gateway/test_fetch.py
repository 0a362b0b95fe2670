"""What requests name by address: not fetched unless an operator says so, and then from the open internet alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from polymux.core.config import ByteSize
from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat, Embed
from polymux.gateway.fetch import Fetcher, is_public
from polymux.gateway.settings import GatewaySettings

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("address", "public"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("172.16.0.1", False),
        ("192.168.1.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00:ec2::254", False),
        ("::ffff:10.0.0.1", False),
        ("2002:7f00:1::", False),
    ],
)
def test_which_addresses_are_public(address: str, public: bool) -> None:
    assert is_public(address) is public


def ask(url: str) -> Chat:
    return Chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


class Body(httpx.AsyncByteStream):
    """Sent after some seconds."""

    def __init__(self, data: bytes, seconds: float = 0) -> None:
        self.data = data
        self.seconds = seconds

    async def __aiter__(self) -> AsyncIterator[bytes]:
        await asyncio.sleep(self.seconds)
        yield self.data


class Internet:
    """Hosts and what they answer; every connection is noted."""

    def __init__(self, hosts: dict[str, list[str]], answers: dict[str, httpx.Response]) -> None:
        self.hosts = hosts
        self.answers = answers
        self.seen: list[httpx.Request] = []
        self.asked: list[str] = []

    async def look_up(self, host: str, port: int) -> list[str]:
        self.asked.append(host)
        if host not in self.hosts:
            raise OSError("no such host")
        return self.hosts[host]

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.seen.append(request)
        return self.answers[f"{request.headers['host']}{request.url.path}"]

    def open(self, **settings: Any) -> Fetcher:
        values = GatewaySettings(**{"fetch_media": True, **settings})
        return Fetcher(values, look_up=self.look_up, transport=httpx.MockTransport(self.handle))


def internet() -> Internet:
    return Internet(
        {"pictures.example": ["93.184.216.34"], "inner.example": ["93.184.216.35", "10.0.0.1"]},
        {
            "pictures.example/a.png": httpx.Response(200, stream=Body(b"picture")),
            "pictures.example/moved": httpx.Response(302, headers={"location": "/a.png"}),
            "pictures.example/in": httpx.Response(302, headers={"location": "http://inner.example/a.png"}),
            "pictures.example/file": httpx.Response(302, headers={"location": "file:///etc/passwd"}),
            "pictures.example/loop": httpx.Response(302, headers={"location": "/loop"}),
            "pictures.example/gone": httpx.Response(404),
            "pictures.example/zipped": httpx.Response(200, headers={"content-encoding": "br"}, content=b""),
        },
    )


async def test_nothing_is_fetched_by_default() -> None:
    """Not even a name is looked up."""
    net = internet()
    with pytest.raises(InvalidRequest, match="nothing is fetched here") as raised:
        await net.open(fetch_media=False).resolve(ask("http://pictures.example/a.png"))
    assert raised.value.param == "messages[0].content[0].image_url"
    assert net.asked == []


async def test_what_is_fetched_takes_the_address_s_place() -> None:
    """The connection goes to the address that was checked, with the name in its headers."""
    net = internet()
    found: Any = await net.open().resolve(ask("https://pictures.example/moved"))
    assert found.messages[0]["content"][0]["image_url"]["url"] == b"picture"
    assert {request.url.host for request in net.seen} == {"93.184.216.34"}
    assert {request.headers["host"] for request in net.seen} == {"pictures.example"}
    assert net.seen[0].extensions["sni_hostname"] == "pictures.example"
    assert "cookie" not in net.seen[0].headers and "authorization" not in net.seen[0].headers
    net = internet()
    embed: Any = await net.open().resolve(
        Embed(inputs=[{"type": "image_url", "image_url": {"url": "http://pictures.example/a.png"}}])
    )
    assert embed.inputs[0]["image_url"]["url"] == b"picture"


@pytest.mark.parametrize(
    ("url", "complaint", "connections"),
    [
        ("http://inner.example/a.png", "no public host", 0),
        ("http://pictures.example/in", "no public host", 1),
        ("http://pictures.example/file", "neither a data URI nor", 1),
        ("http://pictures.example/loop", "redirects more than", 4),
        ("http://pictures.example/gone", "answers 404", 1),
        ("http://pictures.example/zipped", "compressed", 1),
        ("http://nowhere.example/", "there is no host", 0),
        ("http://user:secret@pictures.example/a.png", "user name", 0),
        ("file:///etc/passwd", "neither a data URI nor", 0),
        ("gopher://pictures.example/", "neither a data URI nor", 0),
        ("http://[::1", "neither a data URI nor", 0),
        ("nonsense", "neither a data URI nor", 0),
    ],
)
async def test_what_is_refused(url: str, complaint: str, connections: int) -> None:
    net = internet()
    with pytest.raises(InvalidRequest, match=complaint):
        await net.open().resolve(ask(url))
    assert len(net.seen) == connections


async def test_size_and_time_are_bounded() -> None:
    net = internet()
    with pytest.raises(InvalidRequest, match="larger than 3 bytes"):
        await net.open(max_fetched_bytes=ByteSize(3)).resolve(ask("http://pictures.example/a.png"))

    net.answers["pictures.example/a.png"] = httpx.Response(200, stream=Body(b"", seconds=30))
    with pytest.raises(InvalidRequest, match="took longer"):
        await net.open(fetch_seconds=0.05).resolve(ask("http://pictures.example/a.png"))
