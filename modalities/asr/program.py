"""The engine half of transcription: a recording's windows are encoded, decoded together, and told in order."""

from __future__ import annotations

import hashlib
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.batch.oneshot import OneShotRow, OneShotStage
from polymux.core.batch.row import Signal
from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.holding import Holding
from polymux.core.cache.prefix import root_digest
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.rules import Only, Suppress, SuppressFirst
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError, InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.tasks import Heard, Sampling
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.activity import SpeechDetector, open_activity
from polymux.modalities.asr.alignment import Aligner, choose_heads, open_alignment
from polymux.modalities.asr.dictation import Dictation
from polymux.modalities.asr.fallback import Attempt, Fallback, choose_attempt, measure_repetition
from polymux.modalities.asr.features import RATE
from polymux.modalities.asr.policies import choose_policy
from polymux.modalities.asr.rules import Timestamps
from polymux.modalities.asr.scribe import Desk
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.whisper import load_whisper
from polymux.modalities.asr.windows import Cutter, Window
from polymux.modalities.asr.work import HEARD, WINDOW, AudioChunk, ListenWork, TranscribeWork, WindowText

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

AHEAD = 8
"""Windows of one recording that are with the engine at once: long ones leave room for others."""

ENGLISH = "en"


class TranscriptionProgram(Program):
    """Each window: one pass of the encoder, then decoder rows that read its slab."""

    def __init__(
        self,
        encoder: OneShotStage,
        decoder: TokenStage,
        longest: int,
        tokens: SpeechTokens,
        reference: str,
        fallback: Fallback | None = None,
        activity: OneShotStage | None = None,
        desk: Desk | None = None,
    ) -> None:
        """`longest` is in samples: what the encoder takes at once. Without `fallback` the first attempt counts;
        without `activity` and `desk` nothing is written down while it lasts."""
        self.work = {"transcribe": TranscribeWork, "translate": TranscribeWork, "listen": ListenWork}
        self.encoder = encoder
        self.decoder = decoder
        self.stages = tuple(stage for stage in (encoder, decoder, activity, desk and desk.align) if stage)
        self._activity = activity
        self._desk = desk
        self.tokens = tokens
        self._longest = longest
        self._fallback = fallback
        self._reference = reference
        self._rules = (
            SuppressFirst(tokens.suppressed_first),
            Suppress(tokens.suppressed),
            Timestamps(tokens.first_stamp, tokens.end, tokens.no_timestamps, tokens.latest_start),
        )
        self._languages = Only(tuple(tokens.languages.values()))

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if isinstance(work, ListenWork) and self._activity is not None and self._desk is not None:
            await Dictation(job, self._desk, self._activity, work).run()
            return
        if not isinstance(work, TranscribeWork):
            raise InvalidRequest("malformed transcription work")
        language = Signal()
        if work.language is not None or not self.tokens.multilingual:
            language.set(work.language or ENGLISH)
        cutter = Cutter(self._longest)
        pending: deque[Signal] = deque()
        detecting = language.done
        while not cutter.complete:
            chunk = unpack(await job.receive(), AudioChunk)
            for window in cutter.push(chunk.samples, chunk.last):
                if window.silent:
                    continue
                if len(pending) == AHEAD:
                    _tell(job, await pending.popleft())
                pending.append(job.spawn(self._transcribe(job, work, window, language, leads=not detecting)))
                detecting = True
        while pending:
            _tell(job, await pending.popleft())
        code = language.value if language.done else ENGLISH
        job.emit(HEARD, Heard(code, cutter.position / RATE))

    def describe(self) -> dict[str, Any]:
        dtype = str(self.decoder.model.shape.dtype).removeprefix("torch.")
        return {"dtype": dtype, "window_seconds": self._longest / RATE}

    async def _transcribe(
        self, job: Job, work: TranscribeWork, window: Window, language: Signal, *, leads: bool
    ) -> WindowText | None:
        """One window's text, or None when it holds no speech. The window that `leads` finds out the language."""
        salt = root_digest(self._reference, hashlib.sha256(window.samples.data).hexdigest())
        slab = await self._encode(job, window)
        if leads:
            language.set(await self._detect(job, slab, salt))
        code = await language
        prompt = [*work.prompt, *self.tokens.forced(job.task, self.tokens.languages.get(code))]
        # <|nospeech|> is read where the decoder sees <|startoftranscript|> last
        before = [*work.prompt, self.tokens.start]
        watch = (self.tokens.no_speech,)
        request = TokenRequest(
            prompt=prompt,
            max_tokens=self._room(prompt),
            sampling=Sampling(temperature=work.temperature),
            stop_ids=frozenset([self.tokens.end]),
            logprobs=0,
            rules=self._rules,
            lasting=True,
            watched=watch if prompt == before else (),
            salt=salt,
            publish=False,
        )
        row = self._start(job, request, slab)
        asked = row
        if prompt != before:
            asked = self._start(job, _peek(before, salt, watched=watch), slab)
            await asked
        await row
        attempt = self._judge(row, _probability(asked.watched[0]))
        if work.temperature == 0.0 and self._fallback is not None and not attempt.settled:
            attempt = await self._try_again(job, request, slab, attempt, self._fallback)
        job.drop(slab)
        if attempt.silent:
            return None
        return WindowText(
            start=window.start,
            count=len(window.samples),
            tokens=attempt.tokens,
            temperature=attempt.temperature,
            avg_logprob=attempt.confidence,
            no_speech_prob=attempt.no_speech,
        )

    async def _try_again(
        self, job: Job, request: TokenRequest, slab: Holding, first: Attempt, fallback: Fallback
    ) -> Attempt:
        """Draws from the same slab, and the same prompt's cache, until an attempt is settled."""
        tried = [first]
        seed = 0
        for temperature in fallback.temperatures:
            rows = []
            for _ in range(fallback.draws):
                seed += 1
                again = replace(request, sampling=Sampling(temperature=temperature), seed=seed, watched=())
                rows.append(self._start(job, again, slab))
            drawn = [self._judge(await row, first.no_speech) for row in rows]
            tried.append(max(drawn, key=lambda attempt: attempt.confidence))
            if tried[-1].settled:
                break
        return choose_attempt(tried)

    def _judge(self, row: TokenRow, no_speech: float) -> Attempt:
        """What a row that ended is worth."""
        row.job.receipt.preemptions += row.preempted
        spoken = [token for token in row.generated if token != self.tokens.end]
        words = [token for token in spoken if token < self.tokens.first_stamp]
        return Attempt(
            tokens=spoken,
            temperature=row.request.sampling.temperature,
            confidence=row.cumulative_logprob / len(row.generated),
            repetition=measure_repetition(self._fallback.decode(words)) if self._fallback is not None else 0.0,
            no_speech=no_speech,
        )

    async def _encode(self, job: Job, window: Window) -> Holding:
        row = OneShotRow(job, window.samples, 1)
        row.keeps = True
        await job.start(self.encoder, row)
        if row.holding is None:
            raise InternalError("the encoder left no slab")
        return row.holding

    async def _detect(self, job: Job, slab: Holding, salt: bytes) -> str:
        """The likeliest language's code: what the decoder would say right after <|startoftranscript|>."""
        request = _peek([self.tokens.start], salt, rules=(self._languages,))
        row = await self._start(job, request, slab)
        codes = {id: code for code, id in self.tokens.languages.items()}
        return codes[row.generated[0]]

    def _start(self, job: Job, request: TokenRequest, slab: Holding) -> TokenRow:
        row = TokenRow(job, request)
        row.reads = [slab]
        job.receipt.input_units += len(request.prompt)
        return job.start(self.decoder, row)

    def _room(self, prompt: list[int]) -> int:
        """Half the context is for what is said, as in training."""
        return min(self.decoder.model.shape.context // 2, self.decoder.capacity - len(prompt))


def _peek(prompt: list[int], salt: bytes, **wanted: Any) -> TokenRequest:
    """One greedy token, seen by the program alone."""
    return TokenRequest(
        prompt=prompt, max_tokens=1, sampling=Sampling(temperature=0.0), salt=salt, publish=False, **wanted
    )


def _probability(logprob: float) -> float:
    return math.exp(min(logprob, 0.0))


def _tell(job: Job, text: WindowText | None) -> None:
    if text is not None:
        job.receipt.output_units += len(text.tokens)
        job.emit(WINDOW, text)


def load_transcription(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
    device = site.device.torch
    encoder, decoder = load_whisper(files.folder, device, read_dtype(options), options.get("quantization"))
    tokenizer = Tokenizer.load(files)
    tokens = SpeechTokens.load(files, tokenizer)
    # on a CPU a window fills every core by itself, and other stages get their turn between two
    together = 1 if device.type == "cpu" else 16
    encode = OneShotStage("encode", encoder, site, max_units=together, max_rows=together)
    decode = TokenStage("decode", decoder, site)
    heads = files.json("generation_config.json").get("alignment_heads")
    config = files.config()
    aligner = Aligner(decoder, choose_heads(heads, config["decoder_layers"], config["decoder_attention_heads"]), site)
    align = open_alignment(aligner, site)
    # decoders that were cut down (turbo, distil) do not follow the sound: 18% wrong with AlignAtt, 5% without
    policy = choose_policy(tokenizer, aligned=bool(heads) and config["decoder_layers"] == config["encoder_layers"])
    return TranscriptionProgram(
        encode,
        decode,
        encoder.samples,
        tokens,
        files.reference,
        Fallback(tokenizer.decode),
        open_activity(SpeechDetector.load(device), site),
        Desk(encode, decode, tokens, files.reference, encoder.frames, policy, align),
    )
