"""What an operator may set on the gateway. Frozen: read once at start, never changed while serving."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from polymux.core.config import ByteSize
from polymux.core.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class GatewaySettings:
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0: any free port; the log names it."""
    api_keys: tuple[str, ...] = ()
    """Empty: no key is asked for, which is allowed on a loopback address only."""
    insecure: bool = False
    """Serve on any address without a key."""
    max_body_bytes: ByteSize = ByteSize(32 * 2**20)
    """Also "8MiB". Room for a few photographs."""
    max_upload_bytes: ByteSize = ByteSize(2**30)
    """Of a form with a file; it waits on disk, not in memory."""
    fetch_media: bool = False
    """Fetch pictures that requests name by address, from public hosts only."""
    max_fetched_bytes: ByteSize = ByteSize(20 * 2**20)
    """Of one picture that is fetched."""
    fetch_seconds: Annotated[float, Meta(gt=0)] = 10.0
    """For all that one request names."""
    max_running: Annotated[int, Meta(gt=0)] = 256
    """Choices (n times prompts) per model that are with the engine at once."""
    max_waiting: Annotated[int, Meta(ge=0)] = 1024
    """Choices per model that may wait for those; beyond it requests are answered 429."""
    drain_seconds: Annotated[float, Meta(ge=0)] = 5.0
    """After SIGTERM: how long requests are still accepted while `/readyz` already says 503."""
    finish_seconds: Annotated[float, Meta(ge=0)] = 45.0
    """After that: how long running answers may take before they are cut."""

    def check(self) -> None:
        """Raises `ConfigError` for an address that would let strangers in, and for a key that is none."""
        if not (self.api_keys or self.insecure or is_loopback(self.host)):
            raise ConfigError(
                f"refusing to serve on {self.host} without an API key: "
                "set one (api_keys in [gateway], or POLYMUX_GATEWAY_API_KEYS), "
                "bind a loopback address, or pass --insecure"
            )
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("gateway.api_keys holds an empty key")


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
