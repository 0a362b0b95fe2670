"""Programs whose bodies are a test's own, and models that do what a test needs: upset by a token, slow, failing."""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import torch
from torch import Tensor

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.stage import Stage
from polymux.core.batch.tokens import TokenBatch, TokenModel, TokenStage
from polymux.core.cache.blocks import CacheSpec
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama

RAISES, NAN, FULL = 94, 95, 96
"""Token ids that make the model below raise, produce NaN, and run out of memory."""

GREEDY = Sampling(temperature=0.0)


class Delicate(TokenModel):
    """A tiny Llama that three tokens upset, each in its own way."""

    def __init__(self) -> None:
        model = build(tiny_llama)
        with torch.no_grad():
            model.get_input_embeddings().weight[NAN] = float("nan")
            model.get_output_embeddings().weight[[RAISES, NAN, FULL]] = 0.0
        self.inner = TransformersDecoder(model)
        self.shape = self.inner.shape
        self.launches = 0

    def forward(self, batch: TokenBatch) -> Tensor:
        self.launches += 1
        ids = batch.ids.tolist()
        if RAISES in ids:
            raise RuntimeError("this token upsets the model")
        if FULL in ids:
            raise torch.OutOfMemoryError("CUDA out of memory (simulated)")
        return self.inner.forward(batch)


class Work(msgspec.Struct, kw_only=True, omit_defaults=True):
    prompt: list[int]
    tokens: int = 4
    item: int = 0


class Said(msgspec.Struct):
    text: str


Body = Callable[["Scripted", Job, Work], Awaitable[None]]


async def generate(program: Scripted, job: Job, work: Work) -> None:
    await job.start(program.tokens, program.row(job, work))


class Scripted(Program):
    """A program whose body is the test's own."""

    def __init__(self, body: Body = generate, *, tokens: TokenStage | None = None, items: OneShotStage | None = None):
        self.work = {"do": Work}
        self.stages: tuple[Stage, ...] = tuple(stage for stage in (tokens, items) if stage is not None)
        self.tokens: Any = tokens
        self.items: Any = items
        self.body = body

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        assert isinstance(work, Work)
        await self.body(self, job, work)

    def row(self, job: Job, work: Work, branch: int = 0) -> TokenRow:
        return TokenRow(job, TokenRequest(work.prompt, work.tokens, GREEDY), branch)


def make_site(device: Device, *, tokens: int = 4000, rows: int = 16, units: int = 64) -> Site:
    """A site whose cache holds so many tokens of the tiny Llama, in blocks of 4."""
    superpage = 4 * 1536
    pages = -(-tokens // 16)
    return Site(
        device,
        SiteSettings(max_rows=rows, max_units=units, block=4, cache_bytes=pages * superpage, superpage=superpage),
    )


def open_tokens(device: Device, body: Body = generate, **options: Any) -> Driver:
    site = make_site(device, **options)
    return Driver(Loop(site, {"m": Scripted(body, tokens=TokenStage("decode", Delicate(), site))}))


def submit(driver: Driver, job: str, prompt: list[int], *, tokens: int = 4, model: str = "m", **options: Any) -> None:
    driver.submit(job, model, "do", Work(prompt=prompt, tokens=tokens), **options)


def prompt_of(number: int, length: int = 7) -> list[int]:
    return [3 + (number * 11 + place * 5) % 90 for place in range(length)]


class Pause(OneShotModel):
    """Items that take `seconds` each, on whatever thread runs them."""

    def __init__(self, seconds: float, slab: CacheSpec | None = None) -> None:
        self.seconds = seconds
        self.slab = slab
        self.threads: set[str] = set()
        self.sizes: list[int] = []
        """Items of each pass."""

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]:
        self.sizes.append(len(items))
        self.threads.add(threading.current_thread().name)
        for item in items:
            if item == FULL:
                raise MemoryError
        for number, slab in enumerate(slabs):
            slab.fill_(items[number])
        time.sleep(self.seconds * len(items))
        return [InvalidRequest("no such item") if item == RAISES else item * 2 for item in items]


async def double(program: Scripted, job: Job, work: Work) -> None:
    row = await job.start(program.items, OneShotRow(job, work.item, 1))
    job.emit("said", Said(str(row.result)))
