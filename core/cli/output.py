"""How verbs print: data on stdout as a table or as JSON, news for a person on stderr."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import typer


def print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2, ensure_ascii=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Columns as wide as their content; never cut, so that the output can be piped."""
    widths = [max(len(row[index]) for row in (columns, *rows)) for index in range(len(columns))]
    for row in (columns, *rows):
        typer.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())


def tell(line: str) -> None:
    """News of what takes long."""
    typer.echo(f"polymux: {line}", err=True)
