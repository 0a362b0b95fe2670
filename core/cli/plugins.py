"""`polymux plugins` lists what was found; `polymux plugin new` and `polymux plugin check` help to write one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymux.core.cli.output import print_json, print_table
from polymux.core.plugins import Plugins

group = typer.Typer(help="Write a plugin and check it.", no_args_is_help=True)


def list_plugins(
    ctx: typer.Context,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Show what each import and hook cost.")] = False,
) -> None:
    """List plugins with their hooks; one that does not work comes with its reason."""
    plugins: Plugins = ctx.obj.plugins
    for ask in (plugins.tasks, plugins.pipelines, plugins.named_models, plugins.model_sources):
        ask()
    for ask in (plugins.routes, plugins.middleware):
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
            typer.echo(f"\n{each['name']}: {each['reason']}")
        for note in each["notes"]:
            typer.echo(f"\n{each['name']}: {note}")
    if trace:
        typer.echo()
        print_trace(plugins)


def print_trace(plugins: Plugins) -> None:
    """Every call that was made, the slowest first."""
    calls = [(plugin.name, call, cost) for plugin in plugins.records for call, cost in plugin.trace.items()]
    calls.sort(key=lambda each: -each[2].ms)
    rows = [[name, call, f"{cost.ms:.1f}", f"{cost.mib:.1f}"] for name, call, cost in calls]
    print_table(["NAME", "CALL", "MS", "MIB"], rows)


@group.command("new")
def write_new(
    kind: Annotated[str, typer.Argument(help="What it brings; an unknown word lists the kinds.")],
    name: Annotated[str, typer.Argument(help="Its name: small letters, digits and dashes.")],
    into: Annotated[Path, typer.Option("--into", help="The folder that its own folder is made in.")] = Path("."),
) -> None:
    """Write a plugin that works before any edit: a module, tests, pyproject.toml."""
    from polymux.core.plugins.scaffold import write_plugin

    folder = write_plugin(kind, name, into)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        typer.echo(path)
    typer.echo(f"\ncheck it:  polymux plugin check {folder}", err=True)
    typer.echo(f"serve it:  {folder / 'README.md'} says how", err=True)


@group.command("check", context_settings={"allow_extra_args": True, "ignore_unknown_options": True})
def check(
    ctx: typer.Context,
    target: Annotated[str, typer.Argument(help="A plugin's name, its file, or its folder.")],
) -> None:
    """Check what a plugin owes; further options go to pytest (-x, -k seed, -v)."""
    from polymux.core.testing.conformance.runner import run_checks

    raise typer.Exit(run_checks(target, ctx.obj.settings.plugins.dirs, ctx.args))
