"""A pipeline answers as it says it does: alone and among others, twice the same, and when it is left or given up."""

from __future__ import annotations

import gc
import json
import shutil
import time
from pathlib import Path

import msgspec
import pytest
import torch

from polymux.core.batch.stage import Stage
from polymux.core.compute.device import LaggedCpu
from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.models import ModelFiles
from polymux.core.models.files import PICKLED
from polymux.core.plugins import Plugin, Plugins
from polymux.core.tasks import Done
from polymux.core.testing.conformance.bench import MODEL, Bench, Question, seeded
from polymux.core.testing.conformance.seal import Seal

NEEDS = ("pipelines",)

CANCEL_SECONDS = 1.0
"""Of the processor's time: a busy machine may take longer by the clock."""

SLACK = 64 << 10
"""Bytes of tensors that may be left after a model was unloaded: constants that a module keeps."""


class Garbage(msgspec.Struct, array_like=True):
    nonsense: dict[str, int]


def test_every_pipeline_has_an_example(record: Plugin, plugins: Plugins) -> None:
    names = {
        name for plugin, found in plugins.answers("pipelines") if plugin is record for name in (p.name for p in found)
    }
    shown = {each.pipeline for each in plugins.examples(record.name)}
    assert names <= shown, f"add examples for {sorted(names - shown)} through the hook `examples`"


def test_it_accepts_its_own_model_and_no_other(bench: Bench, tmp_path: Path) -> None:
    assert bench.pipeline.accepts(bench.files) is True
    assert bench.pipeline.accepts(ModelFiles("an empty folder", tmp_path)) is False
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "something else", "architectures": ["Other"]}))
    assert bench.pipeline.accepts(ModelFiles("somebody else's", tmp_path)) is False


def test_every_task_it_names_is_answered_as_declared(bench: Bench) -> None:
    missing = set(bench.pipeline.tasks) - set(bench.example.asks)
    assert not missing, f"the example asks nothing of {sorted(missing)}"
    known = {task.name: task for task in bench.plugins.tasks()}
    for name in bench.pipeline.tasks:
        assert name in known, f"no plugin declares the task {name!r}"
        streamed = 0
        for ask in bench.example.asks[name]:
            assert isinstance(ask, known[name].ask), f"{name} is asked with {known[name].ask.__name__}"
            answers = bench.alone((name, ask))
            assert isinstance(answers[-1], Done) and not any(isinstance(each, Done) for each in answers[:-1])
            assert len(answers) > 1, f"{name} answered nothing"
            for answer in answers:
                assert isinstance(answer, known[name].answers), f"{name} answers {type(answer).__name__}, undeclared"
            streamed = max(streamed, len(answers) - 1)
        route = known[name].route
        if route is not None and route.stream == "none":
            assert streamed == 1, f"{name} does not stream, and gave {streamed} answers"
        elif route is not None:
            assert streamed > 1, f"{name} streams, and no ask had more than one answer"


def test_its_facts_are_plain(bench: Bench) -> None:
    json.dumps(bench.front.describe())
    program = bench.open().loop.programs[MODEL]
    json.dumps(program.describe())
    assert set(program.work) <= set(bench.pipeline.tasks)
    assert program.stages and all(isinstance(stage, Stage) for stage in program.stages)


def test_a_batch_answers_as_one_alone(bench: Bench) -> None:
    """Whatever is asked beside it, and whether results arrive at once or a launch late."""
    questions = bench.questions * 2
    together = bench.answer(questions, LaggedCpu)
    for question, mine in zip(questions, together, strict=True):
        difference = bench.differ(bench.alone(question), mine)
        assert difference is None, f"{question[0]} alone and in a batch of {len(questions)}: {difference}"


def test_the_same_ask_twice_is_the_same(bench: Bench) -> None:
    for question in bench.questions:
        (again,) = bench.answer([question])
        difference = bench.differ(bench.alone(question), again)
        assert difference is None, f"{question[0]}: {difference}"


def test_a_seed_decides(bench: Bench) -> None:
    seeds = [(task, ask) for task, each in bench.questions for ask in seeded(each, 11)]
    asked = [question for question in seeds if takes(bench, question)]
    if not asked:
        pytest.skip("no ask takes a seed")
    for question, mine in zip(asked, bench.answer(asked, LaggedCpu), strict=True):
        (again,) = bench.answer([question])
        assert bench.differ(mine, again) is None, f"{question[0]}, seed 11: {bench.differ(mine, again)}"


def takes(bench: Bench, question: Question) -> bool:
    """A model that draws nothing may refuse a seed."""
    try:
        bench.prepare(question)
    except InvalidRequest:
        return False
    return True


def test_what_a_user_may_not_ask_is_refused_by_name(bench: Bench) -> None:
    for task, asks in bench.example.refused.items():
        for ask in asks:
            with pytest.raises(PolymuxError) as caught:
                bench.answer([(task, ask)])
            assert isinstance(caught.value, InvalidRequest) or 400 <= caught.value.status < 500, repr(caught.value)
            assert caught.value.param, f"{task}: the error names no param: {caught.value.message}"
    assert bench.example.refused, "the example has nothing that is refused"


def test_a_bad_item_fails_alone(bench: Bench) -> None:
    """Work that no front would send costs its own job; those beside it are answered as ever."""
    questions = bench.engine_questions
    driver = bench.open(LaggedCpu)
    prepared = [bench.submit(driver, str(number), question) for number, question in enumerate(questions)]
    for number, (task, _) in enumerate(questions):
        driver.submit(f"bad {number}", MODEL, task, Garbage({"x": 1}))
    driver.finish()
    for number, (question, each) in enumerate(zip(questions, prepared, strict=True)):
        assert driver.error(f"bad {number}") is not None, f"{question[0]} answered garbage"
        assert driver.error(str(number)) is None, f"{question[0]} failed beside garbage: {driver.error(str(number))}"
        difference = bench.differ(bench.alone(question), bench.present(question, each, driver.reports[str(number)]))
        assert difference is None, f"{question[0]} beside garbage: {difference}"


@pytest.mark.parametrize("steps", [0, 1, 2, 5])
def test_a_cancel_frees_everything_at_once(bench: Bench, steps: int) -> None:
    driver = bench.open(LaggedCpu)
    for number, question in enumerate(bench.engine_questions):
        bench.submit(driver, f"left {number}", question)
        driver.run(steps) if steps else None
        began = time.process_time()
        driver.cancel(f"left {number}")
        driver.finish()
        took = time.process_time() - began
        assert took < CANCEL_SECONDS, f"{question[0]}: {took:.1f} s after the cancel after {steps} steps"
        assert not driver.loop.jobs


def test_unloading_gives_the_memory_back(bench: Bench) -> None:
    bench.answer(bench.engine_questions[:1])  # what a first use keeps for good is not the model's
    before = count_bytes()
    driver = bench.open()
    held = count_bytes() - before
    driver.loop.close()
    del driver
    left = count_bytes() - before
    assert left <= SLACK, f"{left:,} of {held:,} bytes of tensors are still there after the model was unloaded"


def count_bytes() -> int:
    """Bytes of all tensors of this process, each storage once."""
    gc.collect()
    storages = {}
    for thing in gc.get_objects():
        try:
            if issubclass(type(thing), torch.Tensor) and thing.device.type == "cpu":
                storage = thing.untyped_storage()
                storages[storage.data_ptr()] = storage.nbytes()
        except (ReferenceError, RuntimeError, NotImplementedError):
            continue
    return sum(storages.values())


def test_a_model_without_its_weights_is_refused_with_a_reason(bench: Bench, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bench.folder, folder)
    weights = [path for path in folder.rglob("*") if path.suffix in (".safetensors", ".onnx")]
    if not weights:
        pytest.skip("the model has no weights")
    for path in weights:
        path.unlink()
    files = ModelFiles("a broken copy", folder)
    with pytest.raises(PolymuxError) as caught:
        front = bench.pipeline.front(files, bench.example.options)
        del front
        bench.pipeline.load(files, bench.open().loop.site, bench.example.options)
    assert len(caught.value.message) > 20, "the message does not say what is missing"


def test_its_weights_are_safetensors(bench: Bench, seal: Seal) -> None:
    assert not [path.name for path in bench.folder.rglob("*") if path.suffix in PICKLED]
    bench.open()
    assert not [attempt for attempt in seal.attempts if attempt.endswith("load")], seal.attempts
