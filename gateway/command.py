"""`polymux serve`."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from polymux.gateway.lines import LineHandler

if TYPE_CHECKING:
    from polymux.core.cli import Frame
    from polymux.core.engine.child import Child


def serve(
    ctx: typer.Context,
    models: Annotated[list[str] | None, typer.Argument(help="Names or references; none: the starters.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on. Default 127.0.0.1.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on. Default 8000; 0: any free one.")] = None,
    insecure: Annotated[
        bool | None, typer.Option("--insecure", help="Serve beyond this machine without a key.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No line per request.")] = False,
    reload: Annotated[
        bool, typer.Option("--reload", help="Swap the models of a --plugin-dir when its files change.")
    ] = False,
) -> None:
    """Serve models over HTTP, compatible with OpenAI's API."""
    from contextlib import ExitStack

    from polymux.core.engine.child import Child

    with ExitStack() as stack:
        # a development server's engines are many, and begin later
        child = None if reload else stack.enter_context(Child())
        flags = {"host": host, "port": port, "insecure": insecure}
        status = run(ctx.obj, models or [], flags, child, quiet=quiet)
    raise typer.Exit(status)


def run(frame: Frame, models: list[str], flags: dict[str, Any], child: Child | None, *, quiet: bool) -> int:
    """Serve until told to stop; returns the exit status. Without a `child`, models are swapped as plugins change."""
    from setproctitle import setproctitle

    from polymux.core.assembly import assemble
    from polymux.core.cli.output import tell
    from polymux.core.reload import Reloader
    from polymux.gateway.app import create_app, refresh_app
    from polymux.gateway.server import bind_socket, run_server
    from polymux.gateway.settings import GatewaySettings

    setproctitle("polymux gateway")
    settings = frame.config.read("gateway", GatewaySettings, flags)
    settings.check()
    listener = bind_socket(settings)
    reloader = Reloader(frame.settings, frame.plugins, models, tell) if child is None else None
    service = reloader.service if reloader else assemble(frame.settings, frame.plugins, models, tell, child)
    app = create_app(service, settings, plugins=frame.plugins)
    bound, number = listener.getsockname()[:2]
    address = f"http://{f'[{bound}]' if ':' in bound else bound}:{number}"
    tell(f"listening on {address}, loading {', '.join(service.names())}")
    log = None if quiet else start_access_log()
    beside = reloader.watch(lambda plugins: refresh_app(app, plugins)) if reloader else None
    try:
        return run_server(
            app,
            service,
            listener,
            on_ready=lambda: tell(f"ready: {address}/v1, pages at {address}/docs"),
            beside=beside,
        )
    finally:
        if log is not None:
            log.close()


def start_access_log() -> LineHandler:
    """One JSON line per request on stdout."""
    logger = logging.getLogger("polymux.access")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    handler = LineHandler(sys.stdout)
    logger.addHandler(handler)
    return handler
