"""The engine half of codec language models: a token row writes frames, a codec makes them sound as they come."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.prefix import root_digest
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.speech.stretch import PacedTeller, make_stretch_stage
from polymux.core.speech.telling import Teller
from polymux.core.tasks import Sampling
from polymux.modalities.tts.codecs import Codec
from polymux.modalities.tts.frames import FrameLayout
from polymux.modalities.tts.work import Piece, SpeakWork

FIRST_FRAMES = 2
"""Of the first window, so that sound is heard soon; each window is twice the one before."""

MOST_SECONDS = 1.3

LONGEST = 60.0
"""Seconds of one piece: a model that does not come to an end is stopped."""


class CodecProgram(Program):
    """Says a text's pieces one after the other."""

    def __init__(
        self,
        decoder: TokenStage,
        codec: OneShotStage,
        layout: FrameLayout,
        site: Site,
        reference: str,
        sampling: Sampling,
    ) -> None:
        if not isinstance(codec.model, Codec):
            raise InternalError("a codec program needs a codec")
        self.work = {"speak": SpeakWork}
        self.decoder = decoder
        self.vocoder = codec
        self.codec = codec.model
        self.layout = layout
        self.sampling = sampling
        self.stretch = make_stretch_stage(site)
        self.stages = (decoder, codec, self.stretch)
        self.salt = root_digest(reference)
        self.rate = self.codec.rate

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if not isinstance(work, SpeakWork):
            raise InvalidRequest("malformed speech work")
        teller = Teller(job, self.rate)
        number = 0
        while not (piece := unpack(await job.receive(), Piece)).last:
            if piece.ids:
                paced = PacedTeller(job, teller, self.stretch, piece.pace)
                await self._say(job, piece.ids, (work.seed + number) % (1 << 63), paced)
                number += 1
            teller.pause(piece.pause)

    async def _say(self, job: Job, prompt: list[int], seed: int, teller: PacedTeller) -> None:
        request = TokenRequest(
            prompt=prompt,
            max_tokens=self._room(len(prompt)),
            sampling=self.sampling,
            seed=seed,
            stop_ids=self.layout.stop_ids,
            rules=self.layout.rules,
            salt=self.salt,
            publish=False,
        )
        row = job.start(self.decoder, TokenRow(job, request))
        codes = np.zeros((0, self.layout.codebooks), np.int64)
        sent, size, most = 0, FIRST_FRAMES, max(round(MOST_SECONDS * self.rate / self.codec.hop), 1)
        over = False
        while not over:
            await row.reach((sent + size + self.codec.right) * self.layout.tokens)
            codes = np.concatenate([codes, self.layout.read(row, len(codes))])
            over = row.ended.done
            ready = len(codes) if over else len(codes) - self.codec.right
            while ready - sent >= (1 if over else size):  # windows of one length share a pass: none is longer
                end = min(sent + size, ready)
                window = self.codec.window(codes, sent, end, size)
                heard = await job.start(self.vocoder, OneShotRow(job, window, len(window.codes)))
                await teller.tell(heard.result.numpy())
                sent, size = end, min(2 * size, most)
        if not sent:
            raise InternalError("the model said nothing")
        await teller.finish()
        job.receipt.input_units += len(prompt)
        job.receipt.output_units += sent
        job.receipt.preemptions += row.preempted

    def _room(self, prompt: int) -> int:
        frames = round(LONGEST * self.rate / self.codec.hop)
        room = min(self.decoder.capacity - prompt, frames * self.layout.tokens) // self.layout.tokens
        if room < 1:
            raise InvalidRequest("a sentence of input is too long for this model", param="input")
        return room * self.layout.tokens

    def describe(self) -> dict[str, Any]:
        dtype = str(self.decoder.model.shape.dtype).removeprefix("torch.")
        return {"dtype": dtype, "sample_rate": self.rate}
