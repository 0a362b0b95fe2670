"""A pipeline works where it will run: in an engine process that finds the plugin by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from polymux.core.engine.spec import EngineSpec, ModelSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.plugins import Plugins
from polymux.core.service import Served, Service
from polymux.core.testing.conformance.bench import Bench
from polymux.core.testing.local import serving

NEEDS = ("pipelines",)

CACHE = {"cache_bytes": 1 << 26, "superpage": 1 << 18}


@pytest.fixture(scope="session")
def elsewhere(
    benches: dict[int, Bench], folders: list[Path], plugins: Plugins
) -> dict[str, list[list[msgspec.Struct]]]:
    """The answers to every example's questions, from one engine process over all their models."""
    found = list(benches.values())
    specs = [
        ModelSpec(
            name=bench.example.pipeline,
            reference=str(bench.folder),
            folder=str(bench.folder),
            pipeline=bench.example.pipeline,
            options=dict(bench.example.options),
        )
        for bench in found
    ]
    engine = EngineProcess(
        EngineSpec(name="check", models=specs, plugin_dirs=[str(folder) for folder in folders], settings=CACHE)
    )
    service = Service(Served(bench.example.pipeline, bench.pipeline.tasks, bench.front, engine) for bench in found)

    async def ask(bench: Bench, task: str, question: msgspec.Struct) -> list[msgspec.Struct]:
        async with service.open(bench.example.pipeline, task, question) as answers:
            for message in bench.example.messages.get(task, ()):
                answers.post(message)
            return [answer async for answer in answers]

    async def ask_all() -> dict[str, list[list[msgspec.Struct]]]:
        async with serving(service):
            return {
                bench.example.pipeline: list(
                    await asyncio.gather(*(ask(bench, task, question) for task, question in bench.questions))
                )
                for bench in found
            }

    return asyncio.run(ask_all())


def test_another_process_answers_the_same(bench: Bench, elsewhere: dict[str, list[list[msgspec.Struct]]]) -> None:
    for question, theirs in zip(bench.questions, elsewhere[bench.example.pipeline], strict=True):
        difference = bench.differ(bench.alone(question), theirs)
        assert difference is None, f"{question[0]}: {difference}"
