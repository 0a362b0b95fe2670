"""`polymux plugins`: every plugin that was found, and why one of them does not work."""

from __future__ import annotations

from typing import Annotated

import typer

from polymux.core.cli.output import print_json, print_table


def list_plugins(
    ctx: typer.Context, as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False
) -> None:
    """List plugins with their hooks; a disabled one comes with its reason."""
    plugins = ctx.obj.plugins
    for ask in (plugins.tasks, plugins.pipelines, plugins.named_models, plugins.model_sources):
        ask()
    facts = plugins.describe()
    if as_json:
        print_json(facts)
        return
    rows = [
        [each["name"], each["status"], str(each["api_level"] or "-"), ", ".join(each["hooks"]) or "-", each["origin"]]
        for each in facts
    ]
    print_table(["NAME", "STATUS", "API", "HOOKS", "ORIGIN"], rows)
    for each in facts:
        if each["reason"]:
            typer.echo(f"\n{each['reason']}")
