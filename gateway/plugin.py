"""What the gateway adds to polymux, through the same hooks as a stranger's plugin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from polymux.core.hooks import hookimpl

POLYMUX_API_LEVEL = 1


@hookimpl
def checks() -> list[Path]:
    from polymux.gateway import conformance

    return sorted(Path(conformance.__file__).parent.glob("check_*.py"))


@hookimpl
def commands(app: Any) -> None:
    from polymux.gateway.command import serve

    app.command("serve")(serve)
