"""Writes one utterance down while it lasts: looks at what there is, and tells what a policy finds certain.

Each look is an encoder pass over the sound so far, in a window not much longer than that, and a decoder row that
continues what was told. The looks of all sockets are rows of the same stages as everybody's recordings.
"""

from __future__ import annotations

import math
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from polymux.core.batch.row import Row, Signal
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.cache.holding import Holding
from polymux.core.engine.job import Job
from polymux.core.tasks import Sampling
from polymux.modalities.asr.alignment import Reading, start_alignment
from polymux.modalities.asr.desk import Desk
from polymux.modalities.asr.features import HOP, RATE
from polymux.modalities.asr.passes import peek, salt_window, start_decoder, start_encoder
from polymux.modalities.asr.policies import Hypothesis, cut_loop
from polymux.modalities.asr.utterance import Utterance
from polymux.modalities.asr.whisper import STRIDE, Excerpt
from polymux.modalities.asr.work import ListenWork, Written

STEP, LATER = RATE * 3 // 10, RATE
"""Samples of new sound between two looks, before the first words are told and after."""
FIRST = RATE * 4 // 5
"""Samples before the first look: less is guesswork."""
TALK, FINAL_TALK = 6, 10
"""Tokens a second that few outpace, and nobody: more is the model talking to itself, and holds up everyone."""
SLACK, FINAL_SLACK = RATE // 2, RATE
"""Samples that what is not told yet may be longer than it seems."""
NO_SPEECH, UNSURE = 0.6, -1.0


@dataclass(frozen=True)
class Look:
    """What was understood of the utterance's first `length` samples: tokens behind those told by then."""

    length: int
    tokens: Sequence[int]


class Scribe:
    """One utterance's. `write` returns when all of it is told."""

    def __init__(self, job: Job, desk: Desk, work: ListenWork, utterance: Utterance) -> None:
        self.utterance = utterance
        self._job = job
        self._desk = desk
        self._work = work
        self._policy = desk.open_policy()
        self._language = desk.tokens.languages.get(work.language or "")
        self._before: list[int] = []
        """Told, of windows that are cut off."""
        self._told: list[int] = []
        """Told, of the window that is looked at: the decoder is given it."""
        self._looked = 0
        self._covered = 0
        """Samples that need no other look if nothing more is said."""
        self._clear = 0
        """Samples of the window that was looked at when something was last told."""
        self._last: Look | None = None
        self._looking = False
        """Whether what runs is a look; it is not worth its time where it misses speech, while a window that is settled
        misses what belongs to the next one."""
        self._row: Row | None = None
        self._stopped = False
        """Whether the last look was cut short."""
        self._progress = Signal()

    async def write(self) -> None:
        try:
            await self._write()
        finally:
            self._desk.pens.leave(self.utterance)

    async def _write(self) -> None:
        utterance = self.utterance
        while not utterance.spent:
            start = utterance.cut
            window = utterance.take(self._desk.longest)
            if window is not None:
                self._take_pen(urgent=True)
                await self._write_with_pen(self._settle(window, start))
                self._progress.set()
            elif self._due and self._take_pen():
                await self._write_with_pen(self._look())
            else:
                await utterance.changed()
        self._progress.set()
        if not utterance.abandoned:
            self._job.emit(Written.__name__, Written(utterance.index, [], True, utterance.length / RATE))

    def hurry(self) -> None:
        """The utterance may be over, or is: a look that does not see all of its speech is not worth its time."""
        if self._looking and self._row is not None and self._looked < self.utterance.voiced:
            self._job.stop(self._row)

    def abandon(self) -> None:
        """Nobody wants to know any more: `write` returns within a step, and tells nothing more."""
        self.utterance.abandon()
        if self._row is not None:
            self._job.stop(self._row)

    async def progress(self) -> None:
        """Wait until a window is written, or everything."""
        await self._progress
        if not self.utterance.spent:
            self._progress = Signal()

    @property
    def _due(self) -> bool:
        """Whether enough was said since the last look; where it got quiet, anything is."""
        utterance = self.utterance
        if utterance.quiet:
            return self._covered < utterance.voiced
        step = LATER if self._told or self._before else STEP
        wanted = max(self._looked + step, utterance.cut + FIRST)
        return utterance.voiced > self._looked and utterance.length >= wanted

    def _take_pen(self, *, urgent: bool = False) -> bool:
        told = bool(self._told or self._before)
        return self._desk.pens.take(self.utterance, told=told, urgent=urgent or self.utterance.quiet)

    async def _write_with_pen(self, writing: Coroutine[Any, Any, None]) -> None:
        try:
            await writing
        finally:
            self._desk.pens.give_back()

    async def _look(self) -> None:
        """Tell what is certain, and remember the rest: if nothing more is said, it was right."""
        self._looked = length = self.utterance.length
        final = self.utterance.quiet
        self._looking = True
        hypothesis = await self._understand(self.utterance.read(), final=final)
        self._looking = False
        whole = final or (hypothesis is not None and not hypothesis.trimmed)
        if whole:
            self._covered = length
        if hypothesis is None:
            return
        certain = self._policy.judge(hypothesis)
        self._tell(hypothesis.tokens[:certain])
        if certain:
            self._clear = length - self.utterance.cut
        self._last = Look(length, hypothesis.tokens[certain:]) if whole else None

    async def _settle(self, window: np.ndarray, start: int) -> None:
        """A window that nothing is added to: all of it is told. What holds no speech says nothing."""
        utterance, last = self.utterance, self._last
        if last is not None and utterance.spent and last.length >= utterance.voiced:
            self._tell(last.tokens)
        elif utterance.voiced > start:
            hypothesis = await self._understand(window, final=True)
            if self._before and not self._told and (hypothesis is None or hypothesis.trimmed or not hypothesis.tokens):
                self._before = []  # what is said once more was taken for what was said before
                hypothesis = await self._understand(window, final=True)
            self._tell(hypothesis.tokens if hypothesis is not None else ())
        self._before += self._told
        self._told, self._last, self._clear = [], None, 0
        self._policy.reset()

    def _tell(self, tokens: Sequence[int]) -> None:
        if tokens and not self.utterance.abandoned:
            self._told += tokens
            self._job.receipt.output_units += len(tokens)
            self._job.emit(Written.__name__, Written(self.utterance.index, list(tokens)))

    async def _understand(self, samples: np.ndarray, *, final: bool = False) -> Hypothesis | None:
        """What follows on what was told, or None where there is no sense, or no time left.

        What makes no sense in a short window may in the model's own; only last words are worth that.
        """
        frames = self._desk.choose_frames(len(samples), final=final)
        found = await self._transcribe(samples, frames, final)
        if found is None and final and frames < self._desk.frames and not self._stopped:
            found = await self._transcribe(samples, self._desk.frames, final)
        self._row = None
        return found

    async def _transcribe(self, samples: np.ndarray, frames: int, final: bool) -> Hypothesis | None:
        self._stopped = False
        encoding = start_encoder(self._job, self._desk.encoder, Excerpt(samples, frames), urgent=final)
        self._row = encoding
        await encoding
        if encoding.holding is None:
            self._stopped = True
            return None
        slab = encoding.holding
        slab.units = frames
        try:
            salt = salt_window(self._desk.reference)
            row = await self._decode(slab, salt, len(samples), final)
            return await self._judge(row, slab, frames, len(samples)) if row is not None else None
        finally:
            self._job.drop(slab)

    async def _judge(self, row: TokenRow, slab: Holding, frames: int, count: int) -> Hypothesis:
        """With what the tokens were heard at, if the policy wants to know; without what the model only repeats."""
        endless = row.reason != "stop"
        tokens = cut_loop(row.generated, self._told) if endless else row.generated[:-1]
        sounding = max(1, min(frames, count // (STRIDE * HOP)))
        if not (self._policy.aligned and tokens):
            return Hypothesis(tokens, sounding, trimmed=endless)
        read = [*row.request.prompt, *tokens[:-1]]
        reading = Reading(read, slab.blocks[0], frames, sounding)
        aligned = await start_alignment(self._job, self._desk.align, reading, slab)
        attended = aligned.result[-len(tokens) :].argmax(dim=-1).tolist()
        hypothesis = Hypothesis(tokens, sounding, attended)
        count = self._policy.trim(hypothesis)
        return Hypothesis(tokens[:count], sounding, attended[:count], trimmed=endless or count < len(tokens))

    async def _decode(self, slab: Holding, salt: bytes, count: int, final: bool) -> TokenRow | None:
        """The row that wrote what follows; None where it was stopped, or heard nothing, or where last words do not end.

        Of another look that does not end, what it said before it repeated itself is as good as anything.
        """
        tokens = self._desk.tokens
        if tokens.multilingual and self._language is None:
            row = await self._start(peek([tokens.start], salt, rules=(self._desk.languages,)), slab, final)
            if row.reason is None:
                return self._stop()
            self._language = row.generated[0]
        before = self._prompt()
        forced = [*tokens.forced("transcribe", self._language), tokens.no_timestamps, *self._told]
        pace, untold = (FINAL_TALK, count + FINAL_SLACK) if final else (TALK, count - self._clear + SLACK)
        room = min(pace * untold // RATE, self._desk.decoder.capacity - len(before) - len(forced))
        request = TokenRequest(
            prompt=[*before, *forced],
            max_tokens=max(1, room),
            sampling=Sampling(temperature=0.0),
            stop_ids=frozenset([tokens.end]),
            logprobs=0,
            rules=self._desk.rules if self._told else self._desk.first_rules,
            salt=salt,
            publish=False,
        )
        row = self._start(request, slab, final)
        asked = None
        if final and not self._told:
            watch = peek([*before, tokens.start], salt, watched=(tokens.no_speech,))
            asked = start_decoder(self._job, self._desk.decoder, watch, slab, urgent=True)
        await row
        if asked is not None:
            await asked
        if row.reason is None:
            return self._stop()
        unsure = row.cumulative_logprob / len(row.generated) < UNSURE
        silent = asked is not None and asked.watched[0] > math.log(NO_SPEECH)
        return None if (final and row.reason != "stop") or (unsure and (silent or not final)) else row

    def _stop(self) -> None:
        self._stopped = True

    def _start(self, request: TokenRequest, slab: Holding, urgent: bool) -> TokenRow:
        row = start_decoder(self._job, self._desk.decoder, request, slab, urgent=urgent)
        self._row = row
        return row

    def _prompt(self) -> list[int]:
        """What was said before, as much of it as was trained."""
        words = [*self._work.prompt, *self._before]
        room = self._desk.decoder.model.shape.context // 2 - 1
        return [self._desk.tokens.previous, *words[-room:]] if words else []
