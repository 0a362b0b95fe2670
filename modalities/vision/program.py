"""The engine half of vision-language models: unknown pictures are encoded, then the prompt that holds them goes on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec
from transformers import AutoConfig, AutoModelForImageTextToText

from polymux.core.batch.encode import EncodeRow, EncodeStage
from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.sequence import Inlay, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.fast import accelerate
from polymux.core.compute.load import TIERS
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import ConfigError, InternalError, InvalidRequest, ModelError
from polymux.core.generation.guidance import GrammarStage
from polymux.core.generation.program import GenerationProgram
from polymux.core.text.grammar import Grammars
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.vision.embedder import VectorReader, show, tell
from polymux.modalities.vision.processor import read_processor
from polymux.modalities.vision.split import Seeing, split_model
from polymux.modalities.vision.work import LookWork, ShowWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


class LookProgram(GenerationProgram):
    """Chats about pictures. What the encoder made is known by content: a picture that was seen costs no pass."""

    def __init__(
        self,
        encode: EncodeStage,
        encoder: Seeing,
        decode: TokenStage,
        reference: str,
        site: Site,
        grammars: GrammarStage | None = None,
    ) -> None:
        super().__init__(decode, reference, grammars)
        self.work = {"chat": LookWork, "complete": LookWork, "embed": ShowWork}
        reader = VectorReader(encode, encoder.dim)
        self._read = OneShotStage("vectors", reader, site, max_units=256, to_host=True)
        self.stages = (encode, *self.stages, self._read)
        self.encode = encode
        self._encoder = encoder
        self._seen: dict[Job, tuple[Holding, tuple[Inlay, ...]]] = {}

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if isinstance(work, ShowWork):
            await self._embed(job, work)
            return
        if not isinstance(work, LookWork):
            raise InvalidRequest("malformed work about pictures")
        if not work.pictures:
            await super().run(job, work)
            return
        self._check(work)
        self._seen[job] = await self._look(job, work)
        try:
            await super().run(job, work)
        finally:
            del self._seen[job]

    async def _embed(self, job: Job, work: ShowWork) -> None:
        """Pictures as the mean of what the decoder would read of them, from the cache that chats fill."""
        for item in work.pictures.values():
            self._encoder.check(item)
        await tell(job, await show(job, self.encode, self._read, work.pictures))

    def _row(self, job: Job, work: Any, *choice: Any) -> TokenRow:
        row = super()._row(job, work, *choice)
        if job in self._seen:
            holding, inlays = self._seen[job]
            row.request = replace(row.request, inlays=inlays, positions=work.positions)
            row.reads = [holding, *row.reads]
        return row

    def _check(self, work: LookWork) -> None:
        """Raises `InvalidRequest` for pictures that the encoder does not take, or that the prompt has no place for."""
        axes, prompt = self.stage.model.shape.axes, work.prompts[0]
        shape = None if work.positions is None else work.positions.shape
        if len(work.prompts) != 1 or shape != ((axes, len(prompt)) if axes > 1 else None):
            raise InvalidRequest(f"positions of shape {shape} do not fit {len(prompt)} tokens on {axes} axes")
        for picture in work.pictures:
            for item in picture.items:
                self._encoder.check(item)
                kept, wanted = sum(item.counts), self._encoder.count(item)
                ends = [start + count for start, count in zip(item.starts, item.counts, strict=True)]
                if kept != wanted or min(item.starts) < 0 or max(ends) > len(prompt):
                    raise InvalidRequest(f"the prompt keeps {kept} places for {wanted} vectors")

    async def _look(self, job: Job, work: LookWork) -> tuple[Holding, tuple[Inlay, ...]]:
        """What the encoder left of the work's pictures, and where it stands in the prompt."""
        items = {item.digest: item for picture in work.pictures for item in picture.items}
        row = EncodeRow(job, items, {digest: self.encode.blocks(item) for digest, item in items.items()})
        await job.start(self.encode, row)
        if row.holding is None:
            raise InternalError("the encoder left nothing")
        digests = [[item.digest for item in picture.items] for picture in work.pictures]
        job.receipt.encoder_hits = count_known(digests, row.found)
        places = row.places()
        inlays: list[Inlay] = []
        for picture in work.pictures:
            for item in picture.items:
                offset = 0
                for start, count in zip(item.starts, item.counts):
                    inlays.append(Inlay(start, count, places[item.digest], item.digest, offset))
                    offset += count
        return row.holding, tuple(inlays)


def count_known(pictures: Sequence[Sequence[bytes]], found: frozenset[bytes]) -> int:
    """Pictures that cost no pass: all of their items were known, or came earlier in the same prompt."""
    seen = set(found)
    known = 0
    for items in pictures:
        known += seen.issuperset(items)
        seen.update(items)
    return known


ENCODED = 4096
"""Vectors of one encoder pass."""


def load_looking(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> LookProgram:
    """Raises `ModelError` for what cannot be served, `ConfigError` for a wrong option."""
    tier = options.get("tier", "fast")
    if tier not in TIERS:
        raise ConfigError(f"tier {tier!r} is unknown: use {' or '.join(TIERS)}", param="tier")
    try:
        config = AutoConfig.from_pretrained(files.folder)
        model = AutoModelForImageTextToText.from_pretrained(files.folder, config=config, dtype=read_dtype(options))
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"cannot load a vision-language model from {files.folder}: {error}") from error
    encoder, reference = split_model(model.to(site.device.torch), read_processor(files), site.device)
    decoder = reference if tier == "reference" else accelerate(reference)
    encode = EncodeStage("encode", encoder, site, max_units=max(1, ENCODED // encoder.inlay.shape[0]))
    grammars = GrammarStage(Grammars(Tokenizer.load(files), decoder.shape.vocabulary), site)
    return LookProgram(encode, encoder, TokenStage("decode", decoder, site), files.reference, site, grammars)
