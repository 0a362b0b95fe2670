"""The verbs that core brings: run, pull, list, plugins, plugin, doctor."""

from __future__ import annotations

import typer

from polymux.core.cli.catalogue import list_models, pull
from polymux.core.cli.chat import run_model
from polymux.core.cli.doctor import examine
from polymux.core.cli.plugins import group as plugin_group
from polymux.core.cli.plugins import list_plugins


def add_verbs(app: typer.Typer) -> None:
    app.command("run")(run_model)
    app.command("pull")(pull)
    app.command("list")(list_models)
    app.command("plugins")(list_plugins)
    app.command("doctor")(examine)
    app.add_typer(plugin_group, name="plugin")
