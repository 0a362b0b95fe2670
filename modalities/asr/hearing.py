"""Decoding one window: one pass of the encoder, then decoder rows that read its slab, until a text can be trusted.

Language detection, every attempt, every beam and the alignment of words share the one slab.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.row import Signal
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.compute.rules import Only, Suppress, SuppressFirst
from polymux.core.engine.job import Job
from polymux.core.errors import InternalError
from polymux.core.tasks import Sampling
from polymux.modalities.asr.alignment import Reading, start_alignment
from polymux.modalities.asr.beams import search_beams
from polymux.modalities.asr.fallback import Attempt, Fallback, choose_attempt, measure_repetition
from polymux.modalities.asr.passes import peek, salt_window, start_decoder, start_encoder
from polymux.modalities.asr.rules import Timestamps
from polymux.modalities.asr.seek import STAMP
from polymux.modalities.asr.spelling import Speller
from polymux.modalities.asr.tokens import STAMP_SECONDS, SpeechTokens
from polymux.modalities.asr.windows import Window
from polymux.modalities.asr.work import TranscribeWork, WindowText


@dataclass(frozen=True)
class Heard:
    """One window on the device: its slab, and what sets it apart from every other."""

    slab: Holding
    salt: bytes


class Hearing:
    """What every window of every request goes through. `fallback` None: the first attempt counts."""

    def __init__(
        self,
        encoder: OneShotStage,
        decoder: TokenStage,
        tokens: SpeechTokens,
        reference: str,
        fallback: Fallback | None = None,
        align: OneShotStage | None = None,
        warp: OneShotStage | None = None,
        speller: Speller | None = None,
    ) -> None:
        """`align` and `warp` are the stages of `open_alignment` and `open_warping`: without them no word has a time,
        unless the `speller` knows it."""
        self.encoder = encoder
        self.align = align
        self.warp = warp
        self.speller = speller
        self.decoder = decoder
        self.tokens = tokens
        self.fallback = fallback
        self._reference = reference
        self._rules = (
            SuppressFirst(tokens.suppressed_first),
            Suppress(tokens.suppressed),
            Timestamps(tokens.first_stamp, tokens.end, tokens.no_timestamps, tokens.latest_start),
        )
        self._languages = Only(tuple(tokens.languages.values()))

    async def hear(
        self, job: Job, work: TranscribeWork, window: Window, language: Signal, before: Sequence[int], *, leads: bool
    ) -> WindowText | None:
        """One window's text, or None when it holds no speech. The window that `leads` finds out the language.

        `before` is what was said before it.
        """
        heard = await self.encode(job, window)
        try:
            if leads:
                language.set(await self.detect(job, heard))
            code = await language
            attempt = await self._attempt(job, work, heard, self._prompt(work.hotwords, before), code)
            wanted = work.words and not attempt.silent
            bounds, ends = await self._time(job, heard, attempt.tokens, window, code) if wanted else ([], [])
        finally:
            job.drop(heard.slab)
        if attempt.silent:
            return None
        return WindowText(
            start=window.start,
            count=len(window.samples),
            tokens=attempt.tokens,
            temperature=attempt.temperature,
            avg_logprob=attempt.confidence,
            no_speech_prob=attempt.no_speech,
            language=code,
            bounds=bounds,
            ends=ends,
        )

    async def encode(self, job: Job, window: Window) -> Heard:
        """The caller drops the slab."""
        row = await start_encoder(job, self.encoder, window.samples)
        if row.holding is None:
            raise InternalError("the encoder left no slab")
        return Heard(row.holding, salt_window(self._reference))

    async def detect(self, job: Job, heard: Heard) -> str:
        """The likeliest language's code: what the decoder would say right after <|startoftranscript|>."""
        request = peek([self.tokens.start], heard.salt, rules=(self._languages,), lasting=True)
        row = await self.start(job, request, heard)
        codes = {id: code for code, id in self.tokens.languages.items()}
        return codes[row.generated[0]]

    async def _time(
        self, job: Job, heard: Heard, tokens: Sequence[int], window: Window, code: str
    ) -> tuple[list[float], list[float]]:
        """A `WindowText`'s bounds and ends: by the letters where they can be laid into the sound, else by attention."""
        words = [token for token in tokens if token < self.tokens.first_stamp]
        if self.speller is not None and words:
            spelled = await self.speller.time(job, window.samples, words)
            if spelled is not None:
                return spelled
        return await self._warp(job, heard, words, window, code), []

    async def _warp(self, job: Job, heard: Heard, words: Sequence[int], window: Window, code: str) -> list[float]:
        """Where each text token begins and the last one ends, in seconds of the window."""
        if self.align is None or self.warp is None or not words:
            return []
        forced = self.tokens.forced(job.task, self.tokens.languages.get(code))
        # an answer that fills the context leaves no place for the end
        read = [*forced, self.tokens.no_timestamps, *words, self.tokens.end][: self.decoder.model.shape.context]
        frames = self.decoder.model.slab.units if self.decoder.model.slab is not None else 0
        sounding = min(frames, -(-len(window.samples) // STAMP))
        reading = Reading(read, heard.slab.blocks[0], frames, sounding)
        aligned = await start_alignment(job, self.align, reading, heard.slab)
        # what follows <|notimestamps|> is the first word, and what follows the last word is the end
        weights = aligned.result[len(forced) :][: len(words) + 1].float().numpy()
        warped = await job.start(self.warp, OneShotRow(job, weights, 1))
        return [int(frame) * STAMP_SECONDS for frame in warped.result]

    def start(self, job: Job, request: TokenRequest, heard: Heard) -> TokenRow:
        """A decoder row that reads the window."""
        return start_decoder(job, self.decoder, request, heard.slab)

    def _prompt(self, hotwords: Sequence[int], before: Sequence[int]) -> list[int]:
        """What comes before <|startoftranscript|>: as much as was trained, half the context less the answer's start."""
        room = self.decoder.model.shape.context // 2 - 1 - len(hotwords)
        told = [*hotwords, *before[max(0, len(before) - room) :]]
        return [self.tokens.previous, *told] if told else []

    async def _attempt(self, job: Job, work: TranscribeWork, heard: Heard, told: list[int], code: str) -> Attempt:
        prompt = [*told, *self.tokens.forced(job.task, self.tokens.languages.get(code))]
        # <|nospeech|> is read where the decoder sees <|startoftranscript|> last
        start = [*told, self.tokens.start]
        watch = (self.tokens.no_speech,)
        request = TokenRequest(
            prompt=prompt,
            max_tokens=self._room(prompt),
            sampling=Sampling(temperature=work.temperature),
            stop_ids=frozenset([self.tokens.end]),
            logprobs=0,
            rules=self._rules,
            lasting=True,
            watched=watch if prompt == start else (),
            salt=heard.salt,
            publish=False,
        )
        if work.beam_size > 1 and work.temperature == 0.0:
            asked = self.start(job, peek(start, heard.salt, watched=watch), heard)
            await asked
            no_speech = _probability(asked.watched[0])
            attempt = await self._search(job, request, heard, work.beam_size, no_speech)
        else:
            row = asked = self.start(job, request, heard)
            if prompt != start:
                asked = self.start(job, peek(start, heard.salt, watched=watch), heard)
                await asked
            await row
            no_speech = _probability(asked.watched[0])
            attempt = self._judge(row, no_speech)
        if work.temperature > 0.0:
            others = await self._draw(job, request, heard, (work.best_of or 1) - 1, no_speech)
            return max([attempt, *others], key=lambda attempt: attempt.confidence)
        if self.fallback is None or attempt.settled:
            return attempt
        tried = [attempt]
        draws = work.best_of or self.fallback.draws
        for turn, temperature in enumerate(self.fallback.temperatures):
            again = replace(request, sampling=Sampling(temperature=temperature), seed=turn * draws)
            drawn = await self._draw(job, again, heard, draws, no_speech)
            tried.append(max(drawn, key=lambda attempt: attempt.confidence))
            if tried[-1].settled:
                break
        return choose_attempt(tried)

    async def _search(self, job: Job, request: TokenRequest, heard: Heard, beams: int, no_speech: float) -> Attempt:
        """The best text of a beam search: the prompt's blocks, and those of what beams share, are computed once."""

        def start(row: TokenRow) -> TokenRow:
            row.reads = [heard.slab]
            job.receipt.input_units += len(row.tokens)
            return job.start(self.decoder, row)

        best = await search_beams(job, request, beams, start)
        return self._weigh(best.tokens, 0.0, best.confidence, no_speech)

    async def _draw(self, job: Job, request: TokenRequest, heard: Heard, draws: int, no_speech: float) -> list[Attempt]:
        """So many texts from the same slab, and the same prompt's cache."""
        requests = [replace(request, seed=request.seed + 1 + number, watched=()) for number in range(draws)]
        rows = [self.start(job, drawn, heard) for drawn in requests]
        return [self._judge(await row, no_speech) for row in rows]

    def _judge(self, row: TokenRow, no_speech: float) -> Attempt:
        """What a row that ended is worth."""
        row.job.receipt.preemptions += row.preempted
        confidence = row.cumulative_logprob / len(row.generated)
        return self._weigh(row.generated, row.request.sampling.temperature, confidence, no_speech)

    def _weigh(self, generated: Sequence[int], temperature: float, confidence: float, no_speech: float) -> Attempt:
        spoken = [token for token in generated if token != self.tokens.end]
        words = [token for token in spoken if token < self.tokens.first_stamp]
        repetition = measure_repetition(self.fallback.decode(words)) if self.fallback is not None else 0.0
        return Attempt(spoken, temperature, confidence, repetition, no_speech)

    def _room(self, prompt: list[int]) -> int:
        """What transformers leaves for an answer: with published models, whatever the prompt leaves of the context."""
        context = self.decoder.model.shape.context
        longest = (self.tokens.longest or context) + min(len(prompt), context // 2 - 1)
        return min(longest, context, self.decoder.capacity) - len(prompt)


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))
