"""The plugin contract, readable as a table of contents.

A plugin is a module (entry-point group `polymux`, or a file in `--plugin-dir`) with functions marked `@hookimpl`
and named like the ones below. Every hook runs at start-up or once per request at most, never per token or step.
Hooks must be cheap to call and must not import torch: what is heavy belongs into the objects they return.

These are the hooks of API level 1. Their names and arguments stay: a hook that is to go is marked with
`warn_on_impl` for one release before the level rises, an argument with `warn_on_impl_args`, and `polymux plugins`
shows the warning beside the plugin that still uses it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from pathlib import Path

    from polymux.core.batch.drafting import Drafting
    from polymux.core.cache.rules import StepCaching
    from polymux.core.compute.attention import AttentionBackend
    from polymux.core.compute.quantization import Quantizer
    from polymux.core.models import ModelSource
    from polymux.core.pipeline import Pipeline
    from polymux.core.plugins.example import Example
    from polymux.core.text.calls import CallFormat
    from polymux.core.vocabulary import NamedModel, Task

hookspec = pluggy.HookspecMarker("polymux")
hookimpl = pluggy.HookimplMarker("polymux")


@hookspec
def tasks() -> list[Task]:  # type: ignore[empty-body]
    """Capabilities this plugin adds beyond the built-in ones, each with its route and schemas.

    A task with a `route` gets an endpoint with the limits, errors, metrics and OpenAPI of our own, and is reached by
    `polymux.Client` without further code.
    """


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

    For rows that read blocks the first that refuses nothing is taken, a plugin's before core's own; for rows that see
    only themselves the fastest, by a table that is measured and kept. Called in engines only: may import torch.
    """


@hookspec
def quantizers() -> list[Quantizer]:  # type: ignore[empty-body]
    """Number formats of linear layers, by the name that a model's option `quantization` uses.

    A plugin's come before core's own. Called in engines only: may import torch.
    """


@hookspec
def drafters() -> list[Drafting]:  # type: ignore[empty-body]
    """Kinds of speculation: who guesses tokens ahead of a language model, so that one launch says several.

    A model chooses one by name: `options = {speculation = {drafter = "yours", tokens = 5}}`; further keys of that
    table are yours. `Drafting.open` gets the loaded model and returns a `core.batch.speculation.Drafter`, whose
    docstrings say when it is called. It may keep something on the device for every block of tokens
    (`Drafter.cache`: keys and values of its own layers) and ask for the model's hidden states
    (`Drafter.wants_hidden`), as drafters of the EAGLE and MTP kind need. Guesses are checked by the stage against the
    tokens that are drawn anyway: a drafter can be slow or useless, but it cannot change what a model says.

    A plugin's come before core's own ("lookup", "model"). Called in engines only: may import torch.
    """


@hookspec
def call_formats() -> list[CallFormat]:  # type: ignore[empty-body]
    """Ways in which models write calls of tools, asked in this order and before core's own.

    The first whose `shown_by(template)` says yes to a model's chat template is the model's. A format that differs in
    its marks is data: `CallFormat("mine", "object", begin="<call>", end="</call>", sign="<call>")`. One of a kind of
    its own subclasses `CallFormat` and overrides `write` (the grammar of an answer that calls tools, from which
    `required` and `strict` get their guarantee) and `open_reader` (reads the answer as it streams, as `core.text.parts`
    describes).

    Called in the gateway's process: must not import torch.
    """


@hookspec
def step_caches() -> list[StepCaching]:  # type: ignore[empty-body]
    """Rules by which a denoising model skips steps, by the name that a model's option `step_cache` uses.

    A plugin's come before core's own. Called in engines only: may import torch.
    """


@hookspec
def routes() -> list[Any]:  # type: ignore[empty-body]
    """Starlette routes mounted beside the tasks' own, for pages and endpoints that serve no model."""


@hookspec
def middleware() -> list[Any]:  # type: ignore[empty-body]
    """Starlette `Middleware` entries, outermost first, inside of the gateway's own access log and keys.

    One that raises before it has passed a request on is left out from then on, and the request goes on without it.
    """


@hookspec
def commands(app: Any) -> None:
    """Add verbs to the command line.

    `app` is the typer application of `polymux`; a verb finds settings and plugins in `ctx.obj` (`core.cli.Frame`).
    A verb that another plugin has already is refused.
    """


@hookspec
def examples() -> list[Example]:  # type: ignore[empty-body]
    """A tiny model for each pipeline, and what to ask it. Called by `polymux plugin check` only: may import torch."""


@hookspec
def checks() -> list[Path]:  # type: ignore[empty-body]
    """Pytest files that `polymux plugin check` runs on every plugin: what plugins owe to this one."""
