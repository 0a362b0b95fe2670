"""The engine half of vision-language models: unknown tiles are encoded, then the prompt is continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from polymux.core.batch.encode import EncodeRow, EncodeStage
from polymux.core.batch.sequence import Inlay, TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.content import content_digest
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import root_digest
from polymux.core.engine.job import Job
from polymux.core.errors import ContextTooLong, InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.modalities.vision.idefics import TileEncoder
from polymux.modalities.vision.work import LookWork


class LookProgram(Program):
    """Chats about pictures. Tiles are known by content: the same picture costs no pass, whoever asks again."""

    def __init__(self, encode: EncodeStage, encoder: TileEncoder, decode: TokenStage, reference: str) -> None:
        self.work = {"chat": LookWork}
        self.encode = encode
        self.decode = decode
        self.stages = (encode, decode)
        self._vectors = encoder.vectors
        self._shape = (encoder.channels, encoder.size, encoder.size)
        self._reference = reference

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, LookWork):
            raise InvalidRequest("malformed work about pictures")
        room = self.decode.capacity - len(work.prompt)
        if room < 1:
            raise ContextTooLong(
                f"the prompt has {len(work.prompt)} tokens; this engine's cache holds {self.decode.capacity}",
                param="messages",
            )
        digests = [self._read(picture.tiles) for picture in work.pictures]
        holding, places = None, dict[bytes, int]()
        if work.pictures:
            row = await job.start(self.encode, EncodeRow(job, self._gather(work, digests)))
            if row.holding is None:
                raise InternalError("the encoder left nothing")
            holding = row.holding
            places = {digest: place for place, digest in enumerate(row.digests)}
            job.receipt.encoder_hits = count_known(digests, row.found)
        inlays = tuple(
            Inlay(start, self._vectors, places[digest], digest)
            for picture, tiles in zip(work.pictures, digests)
            for start, digest in zip(picture.starts, tiles, strict=True)
        )
        request = TokenRequest(
            prompt=work.prompt,
            max_tokens=min(work.max_tokens, room),
            sampling=work.sampling,
            stop_ids=frozenset(work.stop_token_ids),
            logprobs=work.logprobs,
            salt=root_digest(self._reference, work.salt),
            inlays=inlays,
        )
        await self._continue(job, request, work.seeds, holding)

    def _read(self, tiles: np.ndarray) -> list[bytes]:
        """The tiles' digests. Raises `InvalidRequest` for what the encoder does not take."""
        if tiles.dtype != np.float32 or tiles.shape[1:] != self._shape:
            raise InvalidRequest(f"tiles of {tiles.dtype} {tiles.shape} are not float32 {self._shape} each")
        return [content_digest(tile, self._reference) for tile in tiles]

    @staticmethod
    def _gather(work: LookWork, digests: list[list[bytes]]) -> dict[bytes, np.ndarray]:
        """Every tile once."""
        return {
            digest: tile for picture, names in zip(work.pictures, digests) for digest, tile in zip(names, picture.tiles)
        }

    def describe(self) -> dict[str, Any]:
        dtype = str(self.decode.model.shape.dtype).removeprefix("torch.")
        return {"dtype": dtype, "context": self.decode.capacity, "tokens_per_tile": self._vectors}

    async def _continue(self, job: Job, request: TokenRequest, seeds: list[int], holding: Holding | None) -> None:
        """The first branch computes the prompt, the others share it."""
        rows: list[TokenRow] = []
        for branch, seed in enumerate(seeds):
            row = TokenRow(job, replace(request, seed=seed), branch)
            row.reads = [holding] if holding is not None else []
            rows.append(job.start(self.decode, row))
            if branch == 0 and len(seeds) > 1:
                await row.started
        for row in rows:
            await row
        job.receipt.input_units = rows[0].prompt_length
        job.receipt.cached_units = rows[0].cached
        job.receipt.output_units = sum(len(row.generated) for row in rows)
        job.receipt.preemptions = sum(row.preempted for row in rows)


def count_known(pictures: Sequence[Sequence[bytes]], found: frozenset[bytes]) -> int:
    """Pictures that cost no pass: all of their tiles were known, or came earlier in the same prompt."""
    seen = set(found)
    known = 0
    for tiles in pictures:
        known += seen.issuperset(tiles)
        seen.update(tiles)
    return known
