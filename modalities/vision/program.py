"""The engine half of vision-language models: unknown tiles are encoded, then the prompt is continued."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from polymux.core.batch.encode import EncodeRow, EncodeStage
from polymux.core.batch.sequence import Inlay, TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import root_digest
from polymux.core.engine.job import Job
from polymux.core.errors import ContextTooLong, InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.modalities.vision.split import Seeing
from polymux.modalities.vision.work import LookWork


class LookProgram(Program):
    """Chats about pictures. What the encoder made is known by content: a picture that was seen costs no pass."""

    def __init__(self, encode: EncodeStage, encoder: Seeing, decode: TokenStage, reference: str) -> None:
        self.work = {"chat": LookWork}
        self.encode = encode
        self.decode = decode
        self.stages = (encode, decode)
        self._encoder = encoder
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
        holding, inlays = await self._look(job, work)
        request = TokenRequest(
            prompt=work.prompt,
            max_tokens=min(work.max_tokens, room),
            sampling=work.sampling,
            stop_ids=frozenset(work.stop_token_ids),
            logprobs=work.logprobs,
            salt=root_digest(self._reference, work.salt),
            inlays=inlays,
            positions=work.positions,
        )
        await self._continue(job, request, work.seeds, holding)

    async def _look(self, job: Job, work: LookWork) -> tuple[Holding | None, tuple[Inlay, ...]]:
        """What the encoder left of the work's pictures, and where it stands in the prompt."""
        if not work.pictures:
            return None, ()
        items = {item.digest: item for picture in work.pictures for item in picture.items}
        for item in items.values():
            self._encoder.check(item)
            if sum(item.counts) != self._encoder.count(item):
                raise InvalidRequest(
                    f"the prompt keeps {sum(item.counts)} places for {self._encoder.count(item)} vectors"
                )
        row = EncodeRow(job, items, {digest: self.encode.blocks(item) for digest, item in items.items()})
        await job.start(self.encode, row)
        if row.holding is None:
            raise InternalError("the encoder left nothing")
        job.receipt.encoder_hits = count_known(
            [[item.digest for item in each.items] for each in work.pictures], row.found
        )
        places = row.places()
        inlays: list[Inlay] = []
        for picture in work.pictures:
            for item in picture.items:
                offset = 0
                for start, count in zip(item.starts, item.counts, strict=True):
                    inlays.append(Inlay(start, count, places[item.digest], item.digest, offset))
                    offset += count
        return row.holding, tuple(inlays)

    def describe(self) -> dict[str, Any]:
        dtype = str(self.decode.model.shape.dtype).removeprefix("torch.")
        return {"dtype": dtype, "context": self.decode.capacity}

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
