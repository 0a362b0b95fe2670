"""The words of polymux, one screen. Read this first.

    Model      a reference resolved to local files (`core.models.ModelFiles`)
    Task       a served capability with its route and schemas
    Pipeline   what a modality registers (`core.pipeline`): accepts models, serves tasks, owns stages and a program
    Stage      one kind of forward pass that many rows share (`core.batch.stage`)
    Job        one request's work: a coroutine that awaits stages, loops, forks, and has an inbox (`core.engine.job`)
    Row        one unit of batching inside a stage: (job, branch) (`core.batch.row`)
    Plan       what the next launch runs, as pure data; the same on every rank (`core.batch.plan`)
    Event      what a job tells its caller; Receipt: where its time and bytes went
    Engine     one process (plus its ranks) that owns a device group and hosts any number of pipelines

What crosses a process boundary is a msgspec Struct, defined here or by the pipeline; arrays travel inline when
small and as shared-memory leases when large (`core.engine.wire`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

API_LEVEL = 1
"""The level of the plugin contract. A plugin states the level it was written for; a newer one is refused."""


@dataclass(frozen=True)
class Route:
    """Where a task is reached over HTTP, as data: the gateway mounts it with limits, metrics and OpenAPI."""

    method: str
    """GET or POST."""
    path: str
    """Begins with a slash."""
    request: type | None = None
    """A pydantic model with a field `model`; None: made from the task's ask."""
    response: type | None = None
    """A pydantic model of the body, or of one frame of a stream."""
    stream: str = "none"
    """none: one answer is the body; sse: each answer is a frame; bytes: the answers' `data`, one after the other."""
    summary: str = ""
    """One line for the documents."""
    upload: str | None = None
    """The field of a multipart form that carries a file. The ask's field of that name is the path where it lies until
    the last answer. None: the body is JSON."""


@dataclass(frozen=True)
class Task:
    """A served capability. `ask` is the Struct a caller hands to a pipeline's front, `answers` what comes back.

    A built-in task's wire format lives in the gateway; a stranger's task brings its `route`.
    """

    name: str
    """As pipelines list it, and as metrics are labelled."""
    ask: type[msgspec.Struct]
    """The Struct that a front is given."""
    answers: tuple[type[msgspec.Struct], ...]
    """Every kind of Struct that a presenter may tell; `Done` among them."""
    route: Route | None = None
    """Where it is reached; None: the gateway knows it by itself, or only programs ask it."""


@dataclass(frozen=True)
class NamedModel:
    """A name that users may put into `model`, with the reference behind it.

    `options` are passed to the pipeline's `load` and `front` (dtype, deterministic, ...).
    `aliases` are the names that clients hard-code; they can be switched off as a whole.
    """

    name: str
    """What users write."""
    reference: str
    """As for `polymux serve`: a folder, `hf:org/name`, a scheme of a plugin's."""
    sha256: str | None = None
    """Of the files; None: whatever they are."""
    aliases: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    pipeline: str | None = None
    """The one that shall serve it; None: the first that accepts it."""
    default: bool = False
    """Served when `polymux serve` is given no model."""


class Usage(msgspec.Struct, omit_defaults=True):
    """What a request consumed. Tokens for text; seconds for audio; steps and pixels for pictures."""

    input_tokens: int = 0
    """Units that were read."""
    output_tokens: int = 0
    """Units that were made."""
    cached_tokens: int = 0
    """Of those read, the ones that a cache answered."""
    reasoning_tokens: int = 0
    """Of those made, the ones that were thought."""
    seconds: float = 0.0
    """Of sound."""


class Receipt(msgspec.Struct, omit_defaults=True):
    """Where a job's time and bytes went. Times are milliseconds on the engine's monotonic clock."""

    queued_ms: float = 0.0
    """From submission to the first launch."""
    first_ms: float = 0.0
    """From submission to the first thing the caller could see."""
    total_ms: float = 0.0
    """From submission to the end."""
    input_units: int = 0
    """Read: tokens, seconds, pictures, as the stage counts."""
    output_units: int = 0
    """Made."""
    cached_units: int = 0
    """Units (prompt tokens, encoder inputs) that a cache answered."""
    launches: int = 0
    """Passes that it took part in."""
    preemptions: int = 0
    """How often it had to make room for others."""
    encoder_hits: int = 0
    """Encoder passes that a cache answered."""
    steps_run: int = 0
    """Denoising steps that were computed."""
    steps_skipped: int = 0
    """Those that a step cache answered."""
    guessed_units: int = 0
    """Tokens that speculation guessed ahead; so many were right:"""
    accepted_units: int = 0
    """Of the guesses, those that were right."""
    sound_seconds: float = 0.0
    """Sound that was made."""

    @property
    def real_time_factor(self) -> float:
        """Seconds that a second of sound took, from submission to the end; 0 without sound."""
        return self.total_ms / 1e3 / self.sound_seconds if self.sound_seconds else 0.0


# ---- gateway -> engine -------------------------------------------------------------------------------------------


class Submit(msgspec.Struct, tag="submit"):
    """Start a job. `work` is the pipeline's own Struct for this task, already encoded."""

    job: str
    model: str
    task: str
    work: msgspec.Raw
    priority: int = 0
    """Higher runs first; equal ones in order of arrival."""
    deadline: float | None = None
    """Seconds from now after which the answer is worthless."""


class Cancel(msgspec.Struct, tag="cancel"):
    """Stop a job within a step and free all it holds. Cancelling an unknown or finished job is no error.

    With `branch`, only that branch (one choice of n) stops, and the others go on.
    """

    job: str
    branch: int | None = None


class Post(msgspec.Struct, tag="post"):
    """Put a message into a running job's inbox (audio, text, an upload still arriving)."""

    job: str
    body: msgspec.Raw


class Stop(msgspec.Struct, tag="stop"):
    """Finish nothing more and exit."""


Command = Submit | Cancel | Post | Stop

# ---- engine -> gateway -------------------------------------------------------------------------------------------


class Complaint(msgspec.Struct, array_like=True):
    """What there is to say about a plugin. `fault`: why it is left out; None: it works, and the notes say how badly."""

    fault: str | None
    notes: list[str]


class Ready(msgspec.Struct, tag="ready", array_like=True):
    """The engine has loaded its models. `models`: name -> facts (dtype, context length, bytes, load seconds)."""

    models: dict[str, dict[str, Any]]
    plugins: dict[str, Complaint] = {}
    """Name -> what went wrong with a plugin in this process."""


class LoadFailed(msgspec.Struct, tag="load_failed", array_like=True):
    """The engine cannot load its models and exits; `error` is `PolymuxError.to_wire()`."""

    error: dict[str, Any]


class Tokens(msgspec.Struct, tag="tokens", array_like=True, gc=False):
    """New tokens of one branch. `logprobs[i]` belongs to `ids[i]`; `top[i]` holds (id, logprob), best first."""

    job: str
    """Whose they are."""
    branch: int
    """Which of its rows."""
    ids: list[int]
    """New token ids, in order."""
    logprobs: list[float] | None = None
    """Of each id, where they were asked for."""
    top: list[list[tuple[int, float]]] | None = None
    """For each id the likeliest, as (id, logprob)."""


class Output(msgspec.Struct, tag="output", array_like=True):
    """Anything else a job emits. `body` is a Struct of the pipeline's own, decoded by its front."""

    job: str
    """Whose it is."""
    kind: str
    """As the program emitted it."""
    body: msgspec.Raw
    """The Struct, packed; `unpack` reads it."""


class BranchEnded(msgspec.Struct, tag="branch", array_like=True):
    """One branch (one choice of n) is complete. `reason`: stop, length, cancelled, or the pipeline's own word."""

    job: str
    branch: int
    reason: str


class Ended(msgspec.Struct, tag="ended", array_like=True):
    """The job is complete. Always the last event of a job that did not fail."""

    job: str
    """Which one."""
    receipt: Receipt
    """Where its time went."""


class Failed(msgspec.Struct, tag="failed", array_like=True):
    """The job failed alone; `error` is `PolymuxError.to_wire()`. Always the last event of a job."""

    job: str
    error: dict[str, Any]


class Stats(msgspec.Struct, tag="stats", array_like=True):
    """Gauges and counters of the engine, sent about once a second while it runs. Names are metric names."""

    values: dict[str, float]


Event = Tokens | Output | BranchEnded | Ended | Failed
Report = Ready | LoadFailed | Stats | Event


class Reports(msgspec.Struct):
    """One message per step: everything the engine has to say since the last one."""

    reports: Sequence[Report]
