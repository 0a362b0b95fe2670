"""Recorded launches with pieces of prompts say what others say, whatever a frame is filled with.

Here a recording is replayed by calling its step again: what the step reads besides its fixed buffers would be seen. The
attention of the test is the reference's, but knows of rows only what is on the device, and leaves padding undefined.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from polymux.core.batch.frame import Frame, list_frames
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.attention import AttentionOptions, PagedBatch
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import LaggedCpu
from polymux.core.compute.drawer import SlotDrawer
from polymux.core.compute.fast import accelerate
from polymux.core.compute.mixed import FREE, PADDED, MixedGraphs
from polymux.core.compute.sampling import SampleBatch, sample
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import DECODERS, VOCABULARY, build

ROWS = 6
FRAMES = [Frame(48, 6, 4), Frame(24, 6, 2), Frame(12, 3, 2), Frame(6, 2, 1)]


class FromDevice(SdpaAttention):
    """Knows rows by what kernels would read."""

    def write(self, key: Tensor, value: Tensor, cache: Tensor, batch: PagedBatch) -> None:
        if batch.bounds is not None:
            kept = batch.positions >= 0
            key, value = key[kept], value[kept]
            batch = replace(batch, token_slots=batch.token_slots[kept], positions=batch.positions[kept], memo={})
        super().write(key, value, cache, batch)

    def paged(self, query: Tensor, cache: Tensor, batch: PagedBatch, options: AttentionOptions) -> Tensor:
        if batch.bounds is None:
            return super().paged(query, cache, batch, options)
        starts, lengths = batch.row_starts.tolist(), batch.row_lengths.tolist()
        real = [row for row in range(len(lengths)) if starts[row + 1] > starts[row]]
        assert all(starts[row + 1] - starts[row] == 1 for row in real if row < batch.bounds.singles)
        ends = [starts[row + 1] for row in real]
        assert [starts[row] for row in real] == [0, *ends][: len(real)]
        rows = replace(
            batch,
            starts=[0, *ends],
            lengths=[lengths[row] for row in real],
            slots=batch.slots[real],
            bounds=None,
            memo={},
        )
        out = torch.full_like(query, float("nan"))
        if real:
            out[: ends[-1]] = super().paged(query[: ends[-1]], cache, rows, options)
        return out


class CpuDrawer(SlotDrawer):
    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        samplings = [Sampling(temperature=each) for each in self._temperatures[slots].tolist()]
        seeds, places = self._seeds[slots].tolist(), positions.tolist()
        drawn = sample(logits.float(), SampleBatch(samplings, seeds, places, [None] * len(places), None))
        return drawn.tokens, drawn.finite


@dataclass
class Again:
    """A recording: its step once more."""

    step: Callable[[], Any]

    def replay(self) -> None:
        self.step()


def open_driver(family: str, *, recorded: bool, room: int = 2000, sampled: float = 0.0) -> tuple[Driver, list[Frame]]:
    """A loop on the tiny model, and the frames that were replayed."""
    decoder = accelerate(TransformersDecoder(build(DECODERS[family])))
    shape = decoder.shape
    superpage = 4 * (-(-shape.layers * 2 * 4 * shape.kv_heads * shape.head_dim * 4 // 512) * 512)
    settings = SiteSettings(
        max_rows=ROWS, max_units=48, block=4, cache_bytes=-(-room // 16) * superpage, superpage=superpage
    )
    site = Site(LaggedCpu(), settings, (FromDevice(),))
    stage = TokenStage("decode", decoder, site)
    used: list[Frame] = []
    if recorded:
        stage._drawer.slots = CpuDrawer(ROWS + 1, torch.device("cpu"))
        stage._mixed = MixedGraphs(stage._mix, (FRAMES[:2], FRAMES[2:]), ROWS, torch.device("cpu"), None)
        with torch.inference_mode():
            stage._mixed.record_few()
            while stage._mixed.record_more():
                pass
        run = stage._mixed.run
        stage._mixed.run = lambda frame, sent: (used.append(frame), run(frame, sent))[1]  # type: ignore[method-assign]
    return Driver(Loop(site, {"m": GenerationProgram(stage, "m")})), used


@pytest.fixture(autouse=True)
def replayed_by_calling(monkeypatch: pytest.MonkeyPatch) -> None:
    def record(step: Callable[[], Any], pool: Any) -> Again:
        step()
        return Again(step)

    monkeypatch.setattr("polymux.core.compute.mixed.record", record)


def serve(driver: Driver, seed: int) -> list[list[int]]:
    """Prompts with beginnings in common, options of every kind, joins and leaves."""
    random = Random(seed)
    base = [random.randrange(3, VOCABULARY) for _ in range(40)]
    kinds = [{}, {"temperature": 0.0}, {"top_k": 4}, {"temperature": 0.0, "frequency_penalty": 1.0}]
    asked = []
    for number in range(9):
        own = [random.randrange(3, VOCABULARY) for _ in range(random.randint(1, 20))]
        work = GenerateWork(
            prompts=[base[: random.choice([0, 16, 40])] + own],
            max_tokens=[random.randint(1, 10)],
            seeds=[number],
            sampling=Sampling(**random.choice(kinds)),
            logprobs=random.choice([None, None, 1]),
        )
        asked.append((random.randint(0, 12), str(number), work))
    for step in range(30):
        for join, job, work in asked:
            if join == step:
                driver.submit(job, "m", "chat", work, priority=int(job) % 2)
        if step == 9:
            driver.cancel("4")
        driver.step()
    driver.finish()
    return [driver.tokens(str(number)) for number in range(9) if number != 4]


def check(family: str, room: int, seed: int) -> float:
    """How many rows were preempted."""
    alone, none = open_driver(family, recorded=False, room=room)
    driver, used = open_driver(family, recorded=True, room=room)
    assert serve(driver, seed) == serve(alone, seed)
    assert not none
    assert len(set(used)) > 1
    return driver.loop.stats()["preemptions_total"]


@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_replayed_launch_says_what_another_says(family: str) -> None:
    assert check(family, 80, 0) > 0


@pytest.mark.slow
@pytest.mark.parametrize("room", [80, 2000])
@pytest.mark.parametrize("family", sorted(DECODERS))
def test_a_replayed_launch_says_what_another_says_at_length(family: str, room: int) -> None:
    assert (sum(check(family, room, seed) for seed in range(1, 4)) > 0) == (room < 2000)


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 40), st.integers(0, 6))
def test_a_plan_gets_the_smallest_frame_that_holds_it(tokens: int, singles: int, chunks: int) -> None:
    class Counts:
        grants = [Counted(1)] * singles + [Counted(2)] * chunks
        units = tokens

    graphs = MixedGraphs(lambda frame, sent: (), (FRAMES, []), ROWS, torch.device("cpu"), None)
    graphs.record_few()
    frame = graphs.choose(Counts)  # type: ignore[arg-type]
    fitting = [each for each in FRAMES if each.tokens >= tokens and each.singles >= singles and each.chunks >= chunks]
    assert frame == min(fitting, default=None)


@dataclass
class Counted:
    count: int


@pytest.mark.parametrize(("units", "rows"), [(4096, 256), (512, 16), (128, 200), (64, 1)])
def test_frames_are_whole_tiles_and_the_first_of_them_serve_most_launches(units: int, rows: int) -> None:
    few, others = list_frames(units, rows)
    everything = [*few, *others]
    assert len(set(everything)) == len(everything) <= 40
    assert len(few) <= 13
    assert all(frame.singles <= frame.tokens <= units for frame in everything)
    for tokens in range(1, min(units, 1024) + 1):
        assert any(tokens <= frame.tokens <= max(FREE, PADDED * tokens) for frame in few)


def test_without_room_for_a_frame_there_are_none() -> None:
    assert list_frames(63, 8) == ([], [])
