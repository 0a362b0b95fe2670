"""The engine half of text embedding and ranking: which stages there are, and how a job walks through them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pipeline import Program
from polymux.core.tasks import Score
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.llm.crossencoder import CrossEncoder, PairItem
from polymux.modalities.llm.embedder import EmbedItem, TextEmbedder
from polymux.modalities.llm.judging import Judge, is_judge
from polymux.modalities.llm.work import SCORE, VECTORS, EmbedWork, RankWork, Vectors

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
        if not len(work.lengths) or work.lengths.min() < 1 or work.lengths.sum() != len(work.ids):
            raise InvalidRequest("malformed embedding work")
        ends = work.lengths.cumsum()
        for first, last in bundle(ends, BUNDLE):
            begin, end = int(ends[first] - work.lengths[first]), int(ends[last - 1])
            item = EmbedItem(work.ids[begin:end], work.lengths[first:last], work.dimensions, work.normalize)
            rows.append(job.start(self.stage, OneShotRow(job, item, end - begin, first)))
        for row in rows:
            await row
            vectors = row.result.numpy()
            if not np.isfinite(vectors).all():
                raise InternalError("the model's output was not finite for this request")
            job.emit(VECTORS, Vectors(row.branch, vectors.shape[1], vectors.tobytes()))
        job.receipt.input_units = sum(row.size for row in rows)

    def describe(self) -> dict[str, Any]:
        return {"dtype": str(self._embedder.dtype).removeprefix("torch."), "dimensions": self._embedder.dimensions}


def bundle(ends: np.ndarray, most: int) -> Iterator[tuple[int, int]]:
    """Runs of texts of at most `most` tokens, or of one text: the first one's number, and the one's behind the last.

    `ends`: where the tokens of each end.
    """
    first = begin = 0
    while first < len(ends):
        last = max(int(np.searchsorted(ends, begin + most, side="right")), first + 1)
        yield first, last
        first, begin = last, int(ends[last - 1])


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
