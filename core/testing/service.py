"""A Service without an engine, for tests of whatever stands in front of one: answers are scripted, work is counted.

fake = FakeService()
fake.script = one_that_fails          # an async generator function (served, task, ask) -> answers
assert fake.cancelled == 1            # a caller left before the last answer
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import msgspec

from polymux.core.errors import InvalidRequest, ModelNotFound, NotReady, PolymuxError
from polymux.core.tasks import Chat, ChoiceEnded, Complete, Done, Embed, TextDelta, TokenLogprob, Vector
from polymux.core.vocabulary import Receipt, Usage

Script = Callable[["FakeServed", str, msgspec.Struct], AsyncIterator[msgspec.Struct]]
Ear = Callable[[msgspec.Struct, "asyncio.Queue[msgspec.Struct]"], AsyncIterator[msgspec.Struct]]

WORDS = ("Hello", ",", " this", " is", " a", " stub", ".")


@dataclass
class FakeServed:
    """A served model as the gateway sees it."""

    name: str
    """What requests call it."""
    tasks: tuple[str, ...] = ("chat", "complete", "embed")
    """Which it serves."""
    aliases: tuple[str, ...] = ()
    """Further names."""
    facts: dict[str, Any] = field(default_factory=dict)
    """What `/v1/models` says of it."""

    def describe(self) -> dict[str, Any]:
        """Facts for `/v1/models`."""
        return self.facts


@dataclass
class FakeService:
    """Serves `models` by running `script` once per opened job."""

    models: tuple[FakeServed, ...] = (FakeServed("stub", aliases=("gpt-stub",)),)
    """What it serves."""
    script: Script = field(default_factory=lambda: speak)
    """Makes the answers: called with the model, the task and the ask."""
    ear: Ear | None = None
    """In place of the script, for the task `listen`: it is given the ask and the job's inbox."""
    ready: bool = True
    """Whether `/readyz` says so."""
    stats: dict[str, float] = field(default_factory=dict)
    """What `/metrics` shows of an engine."""
    opened: list[Answers] = field(default_factory=list)
    """Every job so far."""
    running: int = 0
    """Jobs now."""
    finished: int = 0
    """Jobs that were answered to the end."""
    failed: int = 0
    """Jobs whose script raised."""
    cancelled: int = 0
    """Jobs that were left."""
    engines: tuple[()] = ()
    """There is none."""
    keep: bool = True
    """Remember every opened job in `opened` (switch off for load tests)."""

    async def start(self) -> None:
        """Nothing is loaded: `ready` is what the test says."""

    async def wait_ready(self) -> None:
        """At once."""

    async def stop(self) -> None:
        """Not ready from now on."""
        self.ready = False

    def names(self) -> list[str]:
        """The models' own names."""
        return [served.name for served in self.models]

    def find(self, name: str) -> FakeServed:
        """The model of that name or alias. Raises `ModelNotFound`."""
        for served in self.models:
            if name == served.name or name in served.aliases:
                return served
        raise ModelNotFound(f"model {name!r} is not served here; served: {', '.join(self.names())}", param="model")

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
        """Ask a model; enter the result to start. Raises as `Service.open` does."""
        served = self.find(model)
        if task not in served.tasks:
            raise InvalidRequest(f"model {served.name} does not serve {task!r}", param="model")
        answers = Answers(self, served, task, ask, request_id)
        if self.keep:
            self.opened.append(answers)
        return answers

    def describe(self) -> dict[str, Any]:
        """Facts of every model."""
        return {"ready": self.ready, "models": {served.name: served.describe() for served in self.models}}


@dataclass
class Answers:
    """One opened job: an async context manager around an async iterator of answers."""

    service: FakeService
    served: FakeServed
    task: str
    ask: Any
    request_id: str | None
    inbox: asyncio.Queue[msgspec.Struct] = field(default_factory=asyncio.Queue)
    """What was posted to the job and not yet read."""
    _answers: AsyncIterator[msgspec.Struct] | None = None
    _over: bool = False

    async def __aenter__(self) -> Answers:
        if not self.service.ready:
            raise NotReady("the engine is restarting", retry_after=1)
        if self.task == "listen" and self.service.ear is not None:
            self._answers = self.service.ear(self.ask, self.inbox)
        else:
            self._answers = self.service.script(self.served, self.task, self.ask)
        self.service.running += 1
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.service.running -= 1
        if not self._over:
            self.service.cancelled += 1
        close = getattr(self._answers, "aclose", None)
        if close is not None:
            await close()

    def post(self, message: msgspec.Struct) -> None:
        self.inbox.put_nowait(message)

    async def amend(self, ask: msgspec.Struct) -> None:
        self.inbox.put_nowait(ask)

    def __aiter__(self) -> Answers:
        return self

    async def __anext__(self) -> msgspec.Struct:
        assert self._answers is not None, "iterated outside of `async with`"
        try:
            answer = await anext(self._answers)
        except PolymuxError:
            self._over = True
            self.service.failed += 1
            raise
        if isinstance(answer, Done):
            self._over = True
            self.service.finished += 1
        return answer


async def speak(served: FakeServed, task: str, ask: Any) -> AsyncIterator[msgspec.Struct]:
    """Answers every built-in task at once, deterministically, honouring n, max_tokens, logprobs and dimensions."""
    if isinstance(ask, Embed):
        for index, text in enumerate(ask.inputs):
            width = ask.dimensions or 4
            yield Vector(index, struct.pack(f"<{width}f", *(float(len(text) + axis) for axis in range(width))))
        yield Done(Usage(input_tokens=sum(len(text) for text in ask.inputs)), Receipt(launches=1))
        return
    prompts = ask.prompts if isinstance(ask, Complete) else [ask.messages]
    limit = ask.max_tokens or len(WORDS)
    words = WORDS[:limit]
    for word in words:
        for index in range(len(prompts) * ask.n):
            yield TextDelta(index, word, _logprobs(word, ask.logprobs))
    for index in range(len(prompts) * ask.n):
        yield ChoiceEnded(index, "length" if limit < len(WORDS) else "stop")
    tokens = len(words) * len(prompts) * ask.n
    usage = Usage(input_tokens=_length(ask), output_tokens=tokens, cached_tokens=1)
    yield Done(usage, Receipt(first_ms=1.0, total_ms=2.0, output_units=tokens, launches=len(words)))


def _logprobs(word: str, top: int | None) -> list[TokenLogprob] | None:
    if top is None:
        return None
    others = [TokenLogprob(word if rank == 0 else f"~{rank}", -0.5 - rank, word.encode()) for rank in range(top)]
    return [TokenLogprob(word, -0.5, word.encode(), others)]


def _length(ask: Chat | Complete) -> int:
    if isinstance(ask, Complete):
        return sum(len(prompt) for prompt in ask.prompts)
    return sum(len(str(message["content"])) for message in ask.messages)
