"""What a gateway talks to: models by name, the fronts before them and the engines behind them.

    async with service.open("starter/chat", "chat", ask) as answers:
        async for answer in answers:
            ...

Entering prepares the ask on a preparer thread and submits it; leaving early, at whatever point, cancels the job.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import msgspec

from polymux.core.answers import Answers
from polymux.core.engine.client import Engine
from polymux.core.errors import ConfigError, InvalidRequest, ModelNotFound, NotReady
from polymux.core.pipeline import Front
from polymux.core.preparers import Preparers


@dataclass(frozen=True)
class Served:
    """A model that is served: its names, its tasks, and the two halves of its pipeline."""

    name: str
    tasks: tuple[str, ...]
    front: Front
    engine: Engine
    aliases: tuple[str, ...] = ()
    """Further names that reach it."""
    variant_of: str | None = None
    """The model in the engine, where this is one of its front's variants."""

    @property
    def model(self) -> str:
        """Its name in the engine."""
        return self.variant_of or self.name

    def variants(self) -> list[Served]:
        """What else is served by the same program: `name:variant`, and `alias:variant`."""
        return [
            replace(
                self,
                name=f"{self.name}:{variant}",
                front=front,
                aliases=tuple(f"{alias}:{variant}" for alias in self.aliases),
                variant_of=self.name,
            )
            for variant, front in self.front.variants().items()
        ]

    def describe(self) -> dict[str, Any]:
        """Facts of both halves: the engine's (dtype, bytes) and the front's (context length, voices)."""
        variant = {"variant_of": self.variant_of} if self.variant_of else {}
        return {**self.engine.models.get(self.model, {}), **self.front.describe(), **variant}


class Service:
    """Serves `models`. Raises `ConfigError` when two of them claim one name."""

    def __init__(self, models: Iterable[Served], preparers: Preparers | None = None) -> None:
        self._preparers = preparers or Preparers()
        self._jobs = itertools.count(1)
        self._adopt(each for served in models for each in (served, *served.variants()))

    def _adopt(self, models: Iterable[Served]) -> None:
        served_now = tuple(models)
        by_name: dict[str, Served] = {}
        for served in served_now:
            for name in (served.name, *served.aliases):
                if name in by_name:
                    raise ConfigError(f"two models are called {name}: {by_name[name].name} and {served.name}")
                by_name[name] = served
        self.models, self._by_name = served_now, by_name
        self.engines = tuple(dict.fromkeys(served.engine for served in served_now))

    def swap(self, old: Engine, models: Iterable[Served]) -> None:
        """New requests for the models of `old` go to `models` from now on; what runs ends where it began.

        Whoever swaps starts and stops the engines. Raises `ConfigError` as the constructor does, and changes nothing.
        """
        kept = [served for served in self.models if served.engine is not old]
        self._adopt([*kept, *(each for served in models for each in (served, *served.variants()))])

    async def start(self) -> None:
        """Begin loading every engine and return at once; `ready` tells when requests are answered."""
        for engine in self.engines:
            await engine.start()

    async def wait_ready(self) -> None:
        """Wait until every engine is ready. Raises `ModelError` when one cannot load its models."""
        await asyncio.gather(*(engine.wait_ready() for engine in self.engines))

    async def stop(self) -> None:
        """End the engines; what still runs fails with `NotReady`."""
        await asyncio.gather(*(engine.stop() for engine in self.engines))
        self._preparers.close()

    @property
    def ready(self) -> bool:
        return all(engine.state == "ready" for engine in self.engines)

    @property
    def stats(self) -> dict[str, float]:
        """The engines' gauges and counters, summed; of a ratio the mean."""
        told: dict[str, list[float]] = {}
        for engine in self.engines:
            for name, value in engine.stats.items():
                told.setdefault(name, []).append(value)
        return {name: fmean(values) if name.endswith("_ratio") else sum(values) for name, values in told.items()}

    def names(self) -> list[str]:
        """The models' own names, without aliases, in the order they were given."""
        return [served.name for served in self.models]

    def find(self, name: str) -> Served:
        """The model of that name or alias. Raises `ModelNotFound`, listing what is served."""
        served = self._by_name.get(name)
        if served is None:
            names = ", ".join(self.names()) or "none"
            raise ModelNotFound(f"model {name!r} is not served here; served: {names}", param="model")
        return served

    def open(
        self,
        model: str,
        task: str,
        ask: msgspec.Struct,
        *,
        priority: int = 0,
        deadline: float | None = None,
        request_id: str | None = None,
    ) -> Answers:
        """Ask a model; enter the result to start. `deadline` is in seconds from now.

        Raises `ModelNotFound`, `InvalidRequest` when the model does not serve the task, `NotReady` when it is a
        default one that could not be loaded.
        """
        served = self.find(model)
        if task not in served.tasks:
            tasks = ", ".join(served.tasks)
            raise InvalidRequest(f"model {served.name} does not serve {task!r}; it serves: {tasks}", param="model")
        error = served.engine.models.get(served.name, {}).get("error")
        if error is not None:
            raise NotReady(f"this model could not be loaded: {error}")
        job = f"{request_id or 'job'}-{next(self._jobs)}"
        return Answers(served, self._preparers, job, task, ask, priority, deadline)

    def describe(self) -> dict[str, Any]:
        return {
            "ready": self.ready,
            "engines": [engine.describe() for engine in self.engines],
            "models": {served.name: served.describe() for served in self.models},
        }
