"""Requests about pictures against a loop, timed from the files' bytes to the last token."""

from __future__ import annotations

import argparse
import io
import queue
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from PIL import Image
from shapes import build_model

from polymux.core.batch.encode import EncodeStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.engine.wire import pack
from polymux.core.errors import Overloaded
from polymux.core.pictures import read_picture
from polymux.core.tasks import Sampling
from polymux.core.vocabulary import Failed, Submit, Tokens
from polymux.modalities.vision.cut import PatchCutter
from polymux.modalities.vision.positions import Grid, place_tokens
from polymux.modalities.vision.program import LookProgram
from polymux.modalities.vision.split import split_model
from polymux.modalities.vision.work import Item, LookWork, Picture

PROCESSOR = {
    "patch_size": 16,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


class Asker:
    """Makes requests on threads: a file's bytes become work, and the work a command."""

    def __init__(self, threads: int, text: int, out: int) -> None:
        self.cutter = PatchCutter(PROCESSOR, {}, "<image>", "<video>", timed=True, speed=2.0)
        self.threads = ThreadPoolExecutor(threads)
        self.ready: queue.SimpleQueue[Submit | BaseException] = queue.SimpleQueue()
        self.text = text
        self.out = out

    def ask(self, name: str, file: bytes, words: int) -> None:
        self.threads.submit(self._prepare, name, file, words)

    def _prepare(self, name: str, file: bytes, words: int) -> None:
        try:
            work = self.write(file, random.Random(words))
            while True:
                try:
                    self.ready.put(Submit(name, "m", "chat", pack(work)))
                    return
                except Overloaded:  # what was lent before is read first
                    time.sleep(0.001)
        except BaseException as error:
            self.ready.put(error)

    def write(self, file: bytes, words: random.Random) -> LookWork:
        """The picture between its two marks, then words."""
        (piece,) = self.cutter.cut(read_picture(file, "picture"), "auto", alone=True).pieces
        count = piece.counts[0]
        prompt = [151652, *[151655] * count, 151653, *[words.randrange(10_000) for _ in range(self.text)]]
        assert piece.grid is not None
        return LookWork(
            prompts=[prompt],
            max_tokens=[self.out],
            seeds=[0],
            sampling=Sampling(temperature=0.0),
            pictures=[Picture([Item(piece.pixels, piece.digest, [1], [count])])],
            positions=place_tokens(len(prompt), [Grid(1, *piece.grid)]),
        )


def draw_file(seed: int, side: int) -> bytes:
    """A JPEG file of a picture like a photograph's: soft shapes under a little noise."""
    generator = np.random.default_rng(seed)
    soft = Image.fromarray(generator.integers(0, 256, (16, 16, 3), np.uint8)).resize(
        (side, side), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(soft).astype(np.int16) + generator.integers(-8, 9, (side, side, 1))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, "jpeg", quality=90)
    return file.getvalue()


def build_loop(shape: dict[str, Any], args: argparse.Namespace | SimpleNamespace) -> Loop:
    backends: tuple[Any, ...] = ()
    if not args.tiny:
        from polymux.core.compute.triton.attention import TritonAttention

        backends = (TritonAttention(),)
    cache = (1 << 28) if args.tiny else (args.cache << 30)
    settings = SiteSettings(max_rows=128, max_units=args.chunk, block=16, cache_bytes=cache, slice_ms=args.slice)
    site = Site(open_device("cpu" if args.tiny else "cuda"), settings, backends)
    dtype = torch.float32 if args.tiny else torch.bfloat16
    return Loop(site, {"m": build_program(site, shape, dtype, args.encoded)})


def build_program(site: Site, shape: dict[str, Any], dtype: torch.dtype, encoded: int) -> LookProgram:
    """A model of that shape on the site; `encoded`: vectors of a launch of the encoder."""
    model = build_model(shape, site.device.torch.type, dtype)
    encoder, reference = split_model(model, PROCESSOR, site.device)
    decoder = accelerate(reference, positions=4096)
    if not isinstance(decoder, FastDecoder):
        raise RuntimeError("the decoder is not on the fast tier")
    encode = EncodeStage("encode", encoder, site, max_units=encoded // encoder.inlay.shape[0])
    return LookProgram(encode, encoder, TokenStage("decode", decoder, site), "m", site)


def run(loop: Loop, asker: Asker, files: list[bytes], words: int, name: str) -> tuple[float, float]:
    """Seconds from the first file to the last token, and the mean to a request's first token."""
    began = time.perf_counter()
    for number, file in enumerate(files):
        asker.ask(f"{name} {number}", file, words + number)
    submitted = 0
    tokens = 0
    first: dict[str, float] = {}
    while submitted < len(files) or loop.jobs:
        while submitted < len(files):
            try:
                made = asker.ready.get(block=not loop.jobs, timeout=None)
            except queue.Empty:
                break
            if isinstance(made, BaseException):
                raise made
            loop.handle(made)
            submitted += 1
        loop.step()
        for report in loop.take_reports():
            if isinstance(report, Failed):
                raise RuntimeError(report.error)
            if isinstance(report, Tokens):
                tokens += len(report.ids)
                first.setdefault(report.job, time.perf_counter() - began)
    seconds = time.perf_counter() - began
    if tokens != len(files) * asker.out:
        raise RuntimeError(f"{tokens} tokens of {len(files) * asker.out}")
    while loop.step():
        pass
    return seconds, statistics.mean(first.values())
