"""What a modality registers: a Pipeline with two halves.

The *front* lives in a process without a device (the gateway or a preparer): it tokenises, templates, decodes media
on the way in, and detokenises on the way out. The *program* lives in the engine: it owns the stages and walks each
job through them. Only Structs pass between the two.

    gateway   --ask-->  front.prepare --work-->  engine: program.run(job)  --events-->  presenter --answers-->  gateway
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.vocabulary import Event

if TYPE_CHECKING:
    from polymux.core.batch.stage import Stage
    from polymux.core.engine.job import Job
    from polymux.core.engine.site import Site
    from polymux.core.models import ModelFiles


@dataclass
class Prepared:
    """What `Front.prepare` made of an ask. `work` goes to the engine; `notes` stay here for the presenter.

    An ask that needs no engine (spelling a text in tokens) has no work but its `answers`, `Done` last.
    """

    work: msgspec.Struct | None
    """For the engine; None where the front has answered already."""
    notes: Any = None
    """Whatever the presenter needs to know."""
    messages: Iterable[msgspec.Struct] = ()
    """Posted to the job's inbox right after its submission, in order (for uploads that are read lazily)."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What the gateway may tell before the first answer, such as `prompt_tokens`."""
    answers: Sequence[msgspec.Struct] = ()
    """Without work: everything there is to say."""


class Presenter(ABC):
    """Turns one job's events into its task's answers; holds the state that needs (detokenisers, stop strings)."""

    @abstractmethod
    def feed(self, event: Event) -> list[msgspec.Struct]:
        """Answers that this event completes. Called on the event loop: a few microseconds of work per event.

        `Failed` never arrives here; `Ended` always does, last, unless the job failed or was cancelled.
        """

    def take_unneeded(self) -> Sequence[int]:
        """Branches that became unneeded since the last call (a choice met its stop string): each is stopped within a
        step while the others go on, and the job ends as usual when none is left."""
        return ()


class Front(ABC):
    """The half of a pipeline that needs no device. One per served model; must not import torch."""

    @abstractmethod
    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Check the ask and turn it into engine work. Runs on a preparer thread, may take long, must not block
        on anything but the CPU. Raises `InvalidRequest` (with `param`) for what the user can fix."""

    @abstractmethod
    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        """The presenter for one job."""

    def variants(self) -> Mapping[str, Front]:
        """Further fronts before the same program, by name: each is served as `model:name` (a model's adapters)."""
        return {}

    def describe(self) -> dict[str, Any]:
        """Facts for `/v1/models`: context length, dimensions, sampling rate, voices."""
        return {}


class Program(ABC):
    """The half of a pipeline that lives in the engine. One per loaded model."""

    work: Mapping[str, type[msgspec.Struct]]
    """Task name -> the Struct that `Front.prepare` sends for it."""

    stages: tuple[Stage, ...]
    """Every stage this program's jobs may await."""

    @abstractmethod
    async def run(self, job: Job, work: msgspec.Struct) -> None:
        """Walk one job through the stages, emitting events. Returning ends the job; raising fails it alone."""

    def describe(self) -> dict[str, Any]:
        """Facts for the `Ready` report: dtype, bytes, tier."""
        return {}

    def close(self) -> None:
        """Give back what `load` took beyond the stages."""


class Pipeline(ABC):
    """What a modality registers through the `pipelines` hook."""

    name: str
    """Unique over all plugins; options and examples name it."""
    tasks: tuple[str, ...]
    """Names of the tasks that its models serve."""

    @abstractmethod
    def accepts(self, files: ModelFiles) -> bool:
        """Whether this pipeline can serve the model, judged from its small files (config.json) alone."""

    @abstractmethod
    def front(self, files: ModelFiles, options: Mapping[str, Any]) -> Front:
        """The device-free half. `options` are the model's, and `call_formats`: what the hook of that name brought.

        Raises `ModelError` when a file it needs is missing or wrong.
        """

    @abstractmethod
    def load(self, files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
        """The engine half, weights on the site's device. Raises `ModelError`."""
