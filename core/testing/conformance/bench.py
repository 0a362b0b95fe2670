"""One example at work: its model loaded into a loop, its asks prepared, run and presented as a server would."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polymux.core.compute.device import Device
from polymux.core.engine.load import open_site
from polymux.core.engine.loop import Loop
from polymux.core.models import ModelFiles
from polymux.core.pipeline import Front, Pipeline, Prepared
from polymux.core.plugins import Example, Plugins
from polymux.core.tasks import Done
from polymux.core.testing.drive import Driver
from polymux.core.testing.local import SMALL
from polymux.core.vocabulary import Event

MODEL = "model"

Question = tuple[str, msgspec.Struct]
"""A task and an ask."""


class Bench:
    """Runs asks of one example."""

    def __init__(self, plugins: Plugins, example: Example, folder: Path) -> None:
        self.plugins = plugins
        self.example = example
        self.folder = folder
        self.files = ModelFiles(f"the example of {example.pipeline}", folder)
        self._front: Front | None = None
        self._alone: dict[tuple[str, int], list[msgspec.Struct]] = {}

    @property
    def pipeline(self) -> Pipeline:
        return next(each for each in self.plugins.pipelines() if each.name == self.example.pipeline)

    @property
    def front(self) -> Front:
        if self._front is None:
            self._front = self.pipeline.front(self.files, self.example.options)
        return self._front

    @property
    def questions(self) -> list[Question]:
        """Every ask that is answered, with its task."""
        return [(task, ask) for task, asks in self.example.asks.items() for ask in asks]

    @property
    def engine_questions(self) -> list[Question]:
        """Those that need the engine: a front may answer by itself."""
        return [question for question in self.questions if self.prepare(question).work is not None]

    def open(self, device: type[Device] = Device) -> Driver:
        """A loop of its own, with the model loaded."""
        site = open_site(self.plugins, device(), SMALL)
        return Driver(Loop(site, {MODEL: self.pipeline.load(self.files, site, self.example.options)}))

    def prepare(self, question: Question) -> Prepared:
        """What the front makes of a question."""
        return self.front.prepare(*question)

    def submit(self, driver: Driver, job: str, question: Question) -> Prepared:
        """Prepare a question and hand it to the loop as a job."""
        prepared = self.prepare(question)
        if prepared.work is not None:
            driver.submit(job, MODEL, question[0], prepared.work)
            for message in (*prepared.messages, *self.example.messages.get(question[0], ())):
                driver.post(job, message)
        return prepared

    def present(self, question: Question, prepared: Prepared, events: Sequence[Event]) -> list[msgspec.Struct]:
        """What a caller is told."""
        if prepared.work is None:
            return list(prepared.answers)
        presenter = self.front.present(*question, prepared)
        return [answer for event in events for answer in presenter.feed(event)]

    def alone(self, question: Question) -> list[msgspec.Struct]:
        """The answers to one of `questions`, asked by itself of a model just loaded; asked once, and remembered."""
        task, ask = question
        if (task, id(ask)) not in self._alone:
            (self._alone[task, id(ask)],) = self.answer([question])
        return self._alone[task, id(ask)]

    def answer(self, questions: Sequence[Question], device: type[Device] = Device) -> list[list[msgspec.Struct]]:
        """The answers of all questions, asked at once. Raises what a job failed with."""
        driver = self.open(device)
        prepared = [self.submit(driver, str(number), question) for number, question in enumerate(questions)]
        driver.finish()
        found = []
        for number, (question, each) in enumerate(zip(questions, prepared, strict=True)):
            error = driver.error(str(number))
            if error is not None:
                raise error
            found.append(self.present(question, each, driver.reports[str(number)]))
        return found

    def differ(self, ours: Sequence[msgspec.Struct], theirs: Sequence[msgspec.Struct]) -> str | None:
        """What is different in two answers to one question; None when they are the same."""
        left, right = self.read(ours), self.read(theirs)
        if left.keys() != right.keys():
            return f"one has {sorted(left.keys() ^ right.keys())}, the other has not"
        for key, value in left.items():
            if not self._same(value, right[key]):
                return f"{key}: {shorten(value)} is not {shorten(right[key])}"
        return None

    def read(self, answers: Sequence[msgspec.Struct]) -> dict[str, Any]:
        """Answers without how they were cut into pieces, and without what they cost."""
        texts: defaultdict[str, str] = defaultdict(str)
        data: defaultdict[str, bytes] = defaultdict(bytes)
        values: defaultdict[str, list[Any]] = defaultdict(list)
        for answer in answers:
            if isinstance(answer, Done):
                continue
            fields = msgspec.structs.asdict(answer)
            where = f"{type(answer).__name__}[{fields.get('index', 0)}]"
            piecewise = any(isinstance(value, str | bytes) for value in fields.values())
            for name, value in fields.items():
                if isinstance(value, str):
                    texts[f"{where}.{name}"] += value
                elif isinstance(value, bytes):
                    data[f"{where}.{name}"] += value
                elif not piecewise:
                    values[f"{where}.{name}"] += flatten(value)
        return {**texts, **data, **values}

    def _same(self, left: Any, right: Any) -> bool:
        if self.example.tolerance and isinstance(left, bytes) and len(left) == len(right):
            left, right = (np.frombuffer(each, self.example.dtype).astype(np.float64) for each in (left, right))
        elif not (isinstance(left, list) and isinstance(right, list) and all(map(is_number, [*left, *right]))):
            return bool(left == right)
        left, right = np.asarray(left, np.float64), np.asarray(right, np.float64)
        if left.shape != right.shape:
            return False
        room = self.example.tolerance * float(np.abs(left).max(initial=1e-30))
        return bool(np.all(np.abs(left - right) <= room))


def flatten(value: Any) -> list[Any]:
    """Numbers and whatever else stands in nested lists, in order."""
    if isinstance(value, list | tuple):
        return [inner for each in value for inner in flatten(each)]
    if isinstance(value, np.ndarray):
        return list(value.reshape(-1).tolist())
    return [value]


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:77]}..."


def seeded(ask: msgspec.Struct, seed: int) -> Iterator[msgspec.Struct]:
    """The ask with that seed, if it has one: as a field of its own, or of its sampling."""
    if "seed" in ask.__struct_fields__:
        yield msgspec.structs.replace(ask, seed=seed)
    sampling = getattr(ask, "sampling", None)
    if isinstance(sampling, msgspec.Struct) and "seed" in sampling.__struct_fields__:
        yield msgspec.structs.replace(ask, sampling=msgspec.structs.replace(sampling, seed=seed))
