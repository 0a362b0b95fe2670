"""From a spec to a running engine, through a stranger's plugin: what loads, and what is said when it does not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from polymux.core.engine.child import Child
from polymux.core.engine.load import load, read_settings
from polymux.core.engine.spec import EngineSpec, ModelSpec
from polymux.core.engine.supervisor import EngineProcess
from polymux.core.engine.wire import pack, unpack
from polymux.core.errors import ConfigError, ModelError
from polymux.core.stopwatch import begin, begun, now
from polymux.core.vocabulary import Ended, Output, Submit

PLUGIN = """
import msgspec
from polymux.core.hooks import hookimpl
from polymux.core.pipeline import Pipeline, Program

class Shout(msgspec.Struct):
    text: str

class Shouting(Program):
    work = {"shout": Shout}
    stages = ()

    def __init__(self, mark):
        self.mark = mark

    async def run(self, job, work):
        for word in work.text.split():
            job.emit("word", Shout(word.upper() + self.mark))

    def describe(self):
        return {"mark": self.mark}

class ShoutPipeline(Pipeline):
    name = "shout"
    tasks = ("shout",)

    def accepts(self, files):
        return True

    def front(self, files, options):
        raise NotImplementedError

    def load(self, files, site, options):
        return Shouting(files.path("mark").read_text() * options["times"])

@hookimpl
def pipelines():
    return [ShoutPipeline()]
"""


class Shout(msgspec.Struct):
    text: str


@pytest.fixture
def spec(tmp_path: Path) -> EngineSpec:
    (tmp_path / "shouting.py").write_text(PLUGIN)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mark").write_text("!")
    model = ModelSpec(
        name="loud", reference="folder:model", folder=str(tmp_path / "model"), pipeline="shout", options={"times": 2}
    )
    settings = {"cache_bytes": 64 << 20}
    return EngineSpec(name="loud", models=[model], plugin_dirs=[str(tmp_path / "shouting.py")], settings=settings)


@pytest.mark.slow
def test_a_plugin_in_a_folder_serves_from_an_engine_process(spec: EngineSpec) -> None:
    async def go() -> None:
        begin()
        child = Child()
        engine = EngineProcess(spec, first=child)
        await engine.start()
        try:
            await engine.wait_ready()
            whole = now() - begun()
            assert engine.pid == child.pid
            assert engine.models["loud"].items() >= {"mark": "!!"}.items()
            named = sum(engine.models["loud"]["start_seconds"].values())
            assert named == pytest.approx(whole, rel=0.05, abs=0.3)
            assert engine.models["loud"]["load_seconds"] >= 0
            stream = engine.submit(Submit("j", "loud", "shout", pack(Shout("what a day"))))
            events = [event async for event in stream]
            words = [unpack(event.body, Shout).text for event in events if isinstance(event, Output)]
            assert words == ["WHAT!!", "A!!", "DAY!!"]
            assert isinstance(events[-1], Ended)
        finally:
            await engine.stop()

    asyncio.run(go())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pipeline": "whisper"}, "no pipeline is called 'whisper'"),
        ({"folder": "/nowhere"}, "model loud: folder:model has no mark"),
        (
            {"options": {}},
            "loud: cannot load folder:model: plugin 'shouting', pipelines: shout.load: KeyError: 'times'",
        ),
    ],
    ids=["pipeline", "files", "plugin's bug"],
)
def test_a_model_that_does_not_load_is_named(spec: EngineSpec, change: dict[str, Any], words: str) -> None:
    spec.models = [msgspec.structs.replace(spec.models[0], **change)]
    with pytest.raises(ModelError, match=words):
        load(spec)


def test_an_unknown_setting_is_refused_with_the_known_ones() -> None:
    assert read_settings({"max_rows": 3}).max_rows == 3
    with pytest.raises(ConfigError, match="no setting max_row; there are: "):
        read_settings({"max_row": 3})
