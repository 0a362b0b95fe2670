"""What the gateway adds to polymux, through the same hooks as a stranger's plugin."""

from __future__ import annotations

from typing import Any

from polymux.core.hooks import hookimpl


@hookimpl
def commands(app: Any) -> None:
    from polymux.gateway.command import serve

    app.command("serve")(serve)
