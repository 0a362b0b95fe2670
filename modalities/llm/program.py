"""The engine half of text embedding and ranking: which stages there are, and how a job walks through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux.core.tasks import Score, Vector
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.llm.crossencoder import CrossEncoder, PairItem
from polymux.modalities.llm.embedder import EmbedItem, TextEmbedder
from polymux.modalities.llm.judging import Judge, is_judge
from polymux.modalities.llm.work import SCORE, VECTOR, EmbedWork, RankWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

BUNDLE = 1024
"""Tokens of one request's texts that make one row: rows have a price of their own, and texts are short."""


class EmbeddingProgram(Program):
    """Embeds texts, some in each row of a packed pass."""

    def __init__(self, stage: OneShotStage, embedder: TextEmbedder) -> None:
        self.work = {"embed": EmbedWork}
        self.stage = stage
        self.stages = (stage,)
        self._embedder = embedder

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, EmbedWork):
            raise InvalidRequest("malformed embedding work")
        rows = []
        for first, texts, size in bundle(work.inputs, BUNDLE):
            item = EmbedItem(texts, work.dimensions, work.normalize)
            rows.append(job.start(self.stage, OneShotRow(job, item, size, first)))
        for row in rows:
            await row
            vectors = row.result.numpy()
            if not np.isfinite(vectors).all():
                raise InternalError("the model's output was not finite for this request")
            for index, vector in enumerate(vectors, row.branch):
                job.emit(VECTOR, Vector(index, vector.tobytes()))
        job.receipt.input_units = sum(row.size for row in rows)

    def describe(self) -> dict[str, Any]:
        return {"dtype": str(self._embedder.dtype).removeprefix("torch."), "dimensions": self._embedder.dimensions}


def bundle(texts: Sequence[list[int]], most: int) -> Iterator[tuple[int, Sequence[list[int]], int]]:
    """Texts in runs of at most `most` tokens, or of one: the first's index, the texts, their tokens."""
    first = size = 0
    for index, text in enumerate(texts):
        if size and size + len(text) > most:
            yield first, texts[first:index], size
            first, size = index, 0
        size += len(text)
    if size:
        yield first, texts[first:], size


class RankingProgram(Program):
    """Scores pairs of texts, each an item of one packed pass."""

    def __init__(self, stage: OneShotStage, encoder: CrossEncoder) -> None:
        self.work = {"rank": RankWork}
        self.stage = stage
        self.stages = (stage,)
        self._encoder = encoder

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, RankWork):
            raise InvalidRequest("malformed ranking work")
        items = [PairItem(*pair) for pair in zip(work.inputs, work.segments, strict=True)]
        rows = [job.start(self.stage, OneShotRow(job, item, len(item.ids), i)) for i, item in enumerate(items)]
        for row in rows:
            await row
            score = row.result.item()
            if not math.isfinite(score):
                raise InternalError("the model's output was not finite for this request")
            job.emit(SCORE, Score(row.branch, score))
        job.receipt.input_units = sum(row.size for row in rows)

    def describe(self) -> dict[str, Any]:
        return {"dtype": str(self._encoder.dtype).removeprefix("torch.")}


def load_ranking(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
    files.weights()  # says what is missing before transformers does
    dtype, tier = read_dtype(options), options.get("tier", "fast")
    if is_judge(files.config()):
        words = Judge.read(options).find_words(Tokenizer.load(files))
        encoder = CrossEncoder.judge(files, site, dtype, words, tier=tier)
    else:
        encoder = CrossEncoder.load(files, site, dtype, tier=tier)
    stage = OneShotStage("rank", encoder, site, max_units=site.settings.max_units * 8, to_host=True)
    return RankingProgram(stage, encoder)


def load_embedding(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
    try:
        embedder = TextEmbedder.load(
            files,
            site,
            read_dtype(options),
            tier=options.get("tier", "fast"),
            quantization=options.get("quantization"),
        )
    except OSError as error:
        raise ModelError(f"cannot load an embedder from {files.reference}: {error}") from error
    stage = OneShotStage("embed", embedder, site, max_units=site.settings.max_units * 8, to_host=True)
    return EmbeddingProgram(stage, embedder)
