"""`polymux list` and `polymux pull`: the models that have names, and their files."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from polymux.core.cli.output import print_json, print_table, tell
from polymux.core.errors import ConfigError, ModelError
from polymux.core.models import Catalogue, is_fetched, resolve

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Models = Annotated[list[str] | None, typer.Argument(help="Names or references; the default models when left out.")]


def list_models(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the models that can be served by name, and whether their files are here."""
    sources = ctx.obj.plugins.model_sources()
    models = [
        {**asdict(model), "fetched": is_fetched(model.reference, sha256=model.sha256, sources=sources)}
        for model in Catalogue.gather(ctx.obj.settings, ctx.obj.plugins).models
    ]
    if as_json:
        print_json(models)
        return
    rows = [
        [
            model["name"],
            "yes" if model["default"] else "no",
            "yes" if model["fetched"] else "no",
            ", ".join(model["aliases"]) or "-",
            model["reference"],
        ]
        for model in models
    ]
    print_table(["NAME", "DEFAULT", "FETCHED", "ALIASES", "REFERENCE"], rows)


def pull(
    ctx: typer.Context,
    models: Models = None,
    as_json: AsJson = False,
) -> None:
    """Fetch, verify and convert models, so that serving them starts at once and works offline."""
    chosen = Catalogue.gather(ctx.obj.settings, ctx.obj.plugins).choose(models or [])
    if not chosen:
        raise ConfigError("there is no default model: name one, or install the starters (pip install polymux-starter)")
    pulled, failed = [], False
    for model in chosen:
        try:
            files = resolve(model.reference, sha256=model.sha256, sources=ctx.obj.plugins.model_sources(), report=tell)
        except ModelError as error:
            typer.echo(f"polymux: error: {error.message}", err=True)
            failed = True
            continue
        pulled.append({"name": model.name, "reference": model.reference, "folder": str(files.folder)})
        if not as_json:
            typer.echo(f"{model.name}  {files.folder}")
    if as_json:
        print_json(pulled)
    if failed:
        raise typer.Exit(1)
