"""Short-lived keys for browsers: each opens sockets of `/v1/realtime`, with a session of its own, and nothing else."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from polymux.core.errors import Overloaded

if TYPE_CHECKING:
    from polymux.gateway.schemas.realtime import Session

PREFIX = "ek_"
MOST = 10_000


@dataclass(frozen=True)
class Secret:
    value: str
    expires: int
    """Seconds since the epoch; sockets that are open by then stay open."""
    session: Session


class Secrets:
    """Kept in memory: they end with the server."""

    def __init__(self) -> None:
        self._secrets: dict[str, Secret] = {}

    def issue(self, session: Session, seconds: int) -> Secret:
        """Raises `Overloaded` when too many are valid already."""
        now = time.time()
        if len(self._secrets) >= MOST:
            self._secrets = {value: each for value, each in self._secrets.items() if each.expires > now}
            if len(self._secrets) >= MOST:
                raise Overloaded("too many client secrets are valid; let some expire", retry_after=60)
        secret = Secret(PREFIX + secrets.token_urlsafe(32), int(now) + seconds, session)
        self._secrets[secret.value] = secret
        return secret

    def find(self, value: str) -> Secret | None:
        secret = self._secrets.get(value)
        return secret if secret is not None and secret.expires > time.time() else None
