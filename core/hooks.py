"""The plugin contract, readable as a table of contents.

A plugin is a module (entry-point group `polymux`, or a file in `--plugin-dir`) with functions marked `@hookimpl`
and named like the ones below. Every hook runs at start-up or once per request at most, never per token or step.
Hooks must be cheap to call and must not import torch: what is heavy belongs into the objects they return.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from polymux.core.compute.attention import AttentionBackend
    from polymux.core.models import ModelSource
    from polymux.core.pipeline import Pipeline
    from polymux.core.vocabulary import NamedModel, Task

hookspec = pluggy.HookspecMarker("polymux")
hookimpl = pluggy.HookimplMarker("polymux")


@hookspec
def tasks() -> list[Task]:  # type: ignore[empty-body]
    """Capabilities this plugin adds beyond the built-in ones, each with its route and schemas."""


@hookspec
def pipelines() -> list[Pipeline]:  # type: ignore[empty-body]
    """Pipelines: which models they accept, which tasks they serve, how they load and run."""


@hookspec
def named_models() -> list[NamedModel]:  # type: ignore[empty-body]
    """Models with names of their own, such as `starter/chat`, and the aliases that clients hard-code."""


@hookspec
def model_sources() -> list[ModelSource]:  # type: ignore[empty-body]
    """Schemes of model references (`hf:`, `pypi:`, a folder, your own) and how they become local files."""


@hookspec
def attention_backends() -> list[AttentionBackend]:  # type: ignore[empty-body]
    """Attention implementations; each says on which devices and shapes it can run, and is probed at start.

    The first that refuses nothing is taken, a plugin's before core's own. Called in engines only: this hook alone may
    import torch.
    """


@hookspec
def routes() -> list[Any]:  # type: ignore[empty-body]
    """Starlette routes mounted beside the tasks' own, for pages and endpoints that serve no model."""


@hookspec
def middleware() -> list[Any]:  # type: ignore[empty-body]
    """Starlette `Middleware` entries, outermost first, for the gateway."""


@hookspec
def commands(app: Any) -> None:
    """Add verbs to the command line: `app` is the typer application of `polymux`."""
