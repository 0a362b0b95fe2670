"""Fetching what a request names by address, without being led anywhere else.

Every hop is looked up once, every address it has must be a public one, and the connection goes to the address that was
checked: a name that answers differently a moment later gains nothing. No proxy, cookie or credential of ours is sent.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

import httpx
import msgspec

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Chat, Embed, Tokenize

if TYPE_CHECKING:
    from polymux.gateway.settings import GatewaySettings

REDIRECTS = 3
MOST_FETCHED = 16
"""Addresses of one request."""
PORTS = {"http": 80, "https": 443}

LookUp = Callable[[str, int], Awaitable[list[str]]]
"""The addresses of a host."""


async def look_up(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_public(address: str) -> bool:
    """Whether an address is reached over the open internet: not this machine, its network, nor a cloud's metadata."""
    found = ipaddress.ip_address(address.partition("%")[0])
    inner = getattr(found, "ipv4_mapped", None) or getattr(found, "sixtofour", None)
    if inner is not None:
        return is_public(str(inner))
    return found.is_global and not (found.is_multicast or found.is_reserved or found.is_unspecified)


class Fetcher:
    """`allowed` judges addresses, `look_up` finds them."""

    def __init__(
        self,
        settings: GatewaySettings,
        *,
        allowed: Callable[[str], bool] = is_public,
        look_up: LookUp = look_up,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._enabled = settings.fetch_media
        self._most = int(settings.max_fetched_bytes)
        self._seconds = settings.fetch_seconds
        self._allowed = allowed
        self._look_up = look_up
        self._transport = transport

    async def resolve(self, ask: msgspec.Struct) -> msgspec.Struct:
        """The ask with every address replaced by what is there. Raises `InvalidRequest` naming the part."""
        if isinstance(ask, Tokenize) and ask.chat is not None:
            return msgspec.structs.replace(ask, chat=await self.resolve(ask.chat))
        named = list(find_addresses(ask))
        if not named:
            return ask
        if not self._enabled:
            raise InvalidRequest(
                f"{named[0][2]} is an address, and nothing is fetched here: send the picture as a data URI "
                "(data:image/png;base64,...)",
                param=named[0][2],
                code="unsupported_parameter",
            )
        if len(named) > MOST_FETCHED:
            raise InvalidRequest(f"at most {MOST_FETCHED} addresses are fetched for one request", param="messages")
        try:
            async with asyncio.timeout(self._seconds):
                found = await asyncio.gather(*(self.fetch(holder[key], where) for holder, key, where in named))
        except TimeoutError:
            raise InvalidRequest(f"fetching took longer than {self._seconds:g} seconds", param=named[0][2]) from None
        for (holder, key, _), data in zip(named, found):
            holder[key] = data
        return ask

    async def fetch(self, url: str, where: str) -> bytes:
        """What is at an address. Raises `InvalidRequest`."""
        for _ in range(REDIRECTS + 1):
            target, headers, host = await self._check(url, where)
            client = httpx.AsyncClient(transport=self._transport, trust_env=False, follow_redirects=False)
            try:
                async with (
                    client,
                    client.stream(
                        "GET", target, headers=headers, extensions={"sni_hostname": host}, timeout=self._seconds
                    ) as answer,
                ):
                    if answer.is_redirect:
                        url = urljoin(url, answer.headers.get("location", ""))
                        continue
                    return await self._read(answer, where)
            except httpx.HTTPError as error:
                raise InvalidRequest(f"{where} cannot be fetched: {type(error).__name__}", param=where) from error
        raise InvalidRequest(f"{where} redirects more than {REDIRECTS} times", param=where)

    async def _check(self, url: str, where: str) -> tuple[httpx.URL, dict[str, str], str]:
        """Where to connect: the address that was checked, with the name in the headers."""
        try:
            parts = urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host = port = None
            parts = urlsplit("")
        if parts.scheme not in PORTS or not host:
            raise InvalidRequest(f"{where} is neither a data URI nor an http address", param=where)
        standard = PORTS[parts.scheme]
        if parts.username is not None or parts.password is not None:
            raise InvalidRequest(f"{where} holds a user name", param=where)
        try:
            addresses = await self._look_up(host, port or standard)
        except (OSError, UnicodeError):
            raise InvalidRequest(f"{where}: there is no host {host!r}", param=where) from None
        if not addresses or not all(map(self._allowed, addresses)):
            raise InvalidRequest(f"{where}: {host!r} is no public host", param=where)
        target = httpx.URL(url).copy_with(host=addresses[0], port=port, fragment=None)
        name = host if port in (None, standard) else f"{host}:{port}"
        return target, {"Host": name, "Accept": "image/*", "Accept-Encoding": "identity"}, host

    async def _read(self, answer: httpx.Response, where: str) -> bytes:
        if answer.status_code != 200:
            raise InvalidRequest(f"{where}: the host answers {answer.status_code}", param=where)
        if answer.headers.get("content-encoding", "identity") != "identity":
            raise InvalidRequest(f"{where}: the host sends it compressed", param=where)
        data = bytearray()
        async for part in answer.aiter_raw():
            data += part
            if len(data) > self._most:
                raise InvalidRequest(f"{where} is larger than {self._most} bytes", param=where)
        return bytes(data)


def find_addresses(ask: msgspec.Struct) -> Any:
    """(holder, key, where) of everything that an ask names and does not hold."""
    parts: list[tuple[dict[str, Any], str]] = []
    if isinstance(ask, Chat):
        for i, message in enumerate(ask.messages):
            content = message.get("content")
            if isinstance(content, list):
                parts += [(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
    elif isinstance(ask, Embed):
        parts = [(each, f"input[{i}]") for i, each in enumerate(ask.inputs) if isinstance(each, dict)]
    for part, where in parts:
        if part.get("type") == "image_url":
            yield from _unheld(part["image_url"], "url", f"{where}.image_url")
        elif part.get("type") == "video":
            for k in range(len(part["frames"])):
                yield from _unheld(part["frames"], k, f"{where}.video[{k}]")


def _unheld(holder: Any, key: Any, where: str) -> Any:
    if isinstance(holder[key], str) and holder[key][:5].lower() != "data:":
        yield holder, key, where
