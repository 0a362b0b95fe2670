"""What core itself brings, declared through the same hooks as a stranger's plugin."""

from __future__ import annotations

from typing import Any

from polymux.core.hooks import hookimpl
from polymux.core.models import ModelSource
from polymux.core.tasks import BUILT_IN
from polymux.core.vocabulary import Task


@hookimpl
def tasks() -> list[Task]:
    return list(BUILT_IN)


@hookimpl
def model_sources() -> list[ModelSource]:
    from polymux.core.models.sources import BUILT_IN_SOURCES

    return list(BUILT_IN_SOURCES)


@hookimpl
def commands(app: Any) -> None:
    from polymux.core.cli.verbs import add_verbs

    add_verbs(app)
