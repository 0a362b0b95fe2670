"""The engine half of transcription: a recording becomes windows, and what they say is told in order."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.batch.drafting import open_drafter
from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.row import Signal
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.dtype import read_dtype
from polymux.core.compute.quantization import find_quantization
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Program
from polymux.core.tasks import Heard, Reached
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.activity import Listener, SpeechDetector, open_activity
from polymux.modalities.asr.alignment import Aligner, choose_heads, open_alignment
from polymux.modalities.asr.desk import Desk
from polymux.modalities.asr.dictation import Dictation
from polymux.modalities.asr.drafting import SmallWhisper
from polymux.modalities.asr.fallback import Fallback
from polymux.modalities.asr.hearing import Hearing
from polymux.modalities.asr.pens import Pens
from polymux.modalities.asr.policies import choose_policy
from polymux.modalities.asr.seek import Source, find_rest, find_stride
from polymux.modalities.asr.spelling import Speller
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import RATE
from polymux.modalities.asr.warping import open_warping
from polymux.modalities.asr.whisper import load_whisper, split_whisper
from polymux.modalities.asr.windows import SpeechCutter, Window
from polymux.modalities.asr.work import (
    HEARD,
    REACHED,
    WINDOW,
    AudioChunk,
    ListenWork,
    TranscribeWork,
    WindowText,
)

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

AHEAD = 8
"""Windows of one recording that are with the engine at once: long ones leave room for others."""

HEAD_START_MS = 500.0
"""Of encoding before decoding, on a card: windows that come together are decoded together, as a step reads the same
weights for one and for all. Some seventy windows of a large model."""

LOOKS = 1
"""Looks at once on a CPU, beside those that are last words."""
LOOKS_ON_CARD = 32
"""And on a card."""

PATIENCE_MS = 100.0
"""That new rows of every stage wait for company on a card that is busy: a launch for one takes as long as for ten, and
two hundred sockets need some hundred launches a second if each goes by itself."""

ENGLISH = "en"

FORGETFUL = 0.5
"""The temperature above which what was said is no prompt for what follows."""


class TranscriptionProgram(Program):
    """Windows of all requests are encoded and decoded together."""

    def __init__(self, hearing: Hearing, activity: OneShotStage, longest: int, desk: Desk | None = None) -> None:
        """`activity` is the stage of `open_activity`; `longest` is in samples: what the encoder takes at once. Without
        a `desk` nothing is written down while it lasts."""
        self.work = {"transcribe": TranscribeWork, "translate": TranscribeWork, "listen": ListenWork}
        self.hearing = hearing
        stages = (activity, hearing.encoder, hearing.decoder, hearing.align, hearing.warp)
        self.stages = tuple(stage for stage in stages if stage)
        if hearing.speller is not None:
            self.stages += hearing.speller.stages
        self._activity = activity
        self._desk = desk
        self._longest = longest

    async def run(self, job: Job, work: msgspec.Struct) -> None:
        if isinstance(work, ListenWork) and self._desk is not None:
            await Dictation(job, self._desk, self._activity, work).run()
            return
        if not isinstance(work, TranscribeWork):
            raise InvalidRequest("malformed transcription work")
        language = Signal()
        if work.language is not None or not self.hearing.tokens.multilingual:
            language.set(work.language or ENGLISH)
        samples = await (self._follow if work.seek else self._cut)(job, work, language)
        job.emit(HEARD, Heard(language.value if language.done else ENGLISH, samples / RATE))

    def describe(self) -> dict[str, Any]:
        dtype = str(self.hearing.decoder.model.shape.dtype).removeprefix("torch.")
        return {"dtype": dtype, "window_seconds": self._longest / RATE}

    async def _cut(self, job: Job, work: TranscribeWork, language: Signal) -> int:
        """Windows cut where nobody speaks, many at once; how many samples there were."""
        cutter, listener = SpeechCutter(self._longest, work.endpointing), Listener(self._activity)
        pending: deque[tuple[Window, Signal]] = deque()  # with a list of texts each
        leads = not language.done
        last = False
        while not last:
            chunk = unpack(await job.receive(), AudioChunk)
            last = chunk.last
            probabilities = await listener.hear(job, chunk.samples, last=last)
            for window in cutter.push(chunk.samples, probabilities, last=last):
                if len(pending) == AHEAD:
                    await _tell_next(job, pending)
                pending.append((window, job.spawn(self._hear_out(job, work, window, language, leads=leads))))
                leads = False
        while pending:
            await _tell_next(job, pending)
        return cutter.position

    async def _hear_out(
        self, job: Job, work: TranscribeWork, window: Window, language: Signal, *, leads: bool
    ) -> list[WindowText]:
        """All that a window says: where its last timestamps say that more follows, the rest is heard as one more."""
        texts: list[WindowText] = []
        while text := await self.hearing.hear(job, work, window, language, work.prompt, leads=leads):
            texts.append(text)
            rest = find_rest(text.tokens, self.hearing.tokens.first_stamp, len(window.samples))
            if rest is None:
                break
            text.tokens, text.count = rest.tokens, rest.samples
            window, leads = Window(window.start + rest.samples, window.samples[rest.samples :]), False
        return texts

    async def _follow(self, job: Job, work: TranscribeWork, language: Signal) -> int:
        """One window after another, each from where the last one's timestamps end."""
        source = Source(job)
        before = list(work.prompt)
        while len(samples := await source.read(self._longest)):
            window = Window(source.position, samples)
            text = await self.hearing.hear(job, work, window, language, before, leads=not language.done)
            stride = len(samples)
            if text is not None:
                found = find_stride(text.tokens, self.hearing.tokens.first_stamp, stride)
                text.tokens, stride = found.tokens, found.samples
                if work.remembers:
                    before = [*before, *text.tokens] if text.temperature <= FORGETFUL else list(work.prompt)
            source.advance(stride)
            _tell(job, [text] if text is not None else [], source.position)
        return source.position


async def _tell_next(job: Job, pending: deque[tuple[Window, Signal]]) -> None:
    window, texts = pending.popleft()
    _tell(job, await texts, window.start + len(window.samples))


def _tell(job: Job, texts: list[WindowText], position: int) -> None:
    for text in texts:
        job.receipt.output_units += len(text.tokens)
        job.emit(WINDOW, text)
    job.emit(REACHED, Reached(position / RATE))


def load_transcription(files: ModelFiles, site: Site, options: Mapping[str, Any]) -> Program:
    device = site.device.torch
    # "int8": weights in 8 bits, on a CPU
    quantization = options.get("quantization")
    make = find_quantization(quantization, device)
    encoder, decoder = split_whisper(load_whisper(files.folder, device, read_dtype(options)), make)
    draftings = (*site.draftings, SmallWhisper(encoder, make))
    drafter = open_drafter(options.get("speculation"), decoder, site, draftings)
    encoder.settle()
    tokenizer = Tokenizer.load(files)
    tokens = SpeechTokens.load(files, tokenizer)
    # on a CPU a window fills every core by itself, and other stages get their turn between two
    alone = device.type == "cpu"
    together = 1 if alone else 16
    encode = OneShotStage(
        "encode", encoder, site, max_units=together, max_rows=together, head_start_ms=0.0 if alone else HEAD_START_MS
    )
    decode = TokenStage("decode", decoder, site, drafter=drafter)
    heads = files.json("generation_config.json").get("alignment_heads")
    config = files.config()
    aligner = Aligner(decoder, choose_heads(heads, config["decoder_layers"], config["decoder_attention_heads"]), site)
    align = open_alignment(aligner, site)
    # decoders that were cut down (turbo, distil) do not follow the sound: 18% wrong with AlignAtt, 5% without
    policy = choose_policy(tokenizer, aligned=bool(heads) and config["decoder_layers"] == config["encoder_layers"])
    # `spell_by`: the folder of a CTC model, for finer times of words
    speller = Speller.load(Path(options["spell_by"]), tokenizer, site) if options.get("spell_by") else None
    pens = Pens(LOOKS if alone else LOOKS_ON_CARD)
    activity = open_activity(SpeechDetector.load(device), site)
    if not alone:
        for stage in (activity, encode, decode, align):
            stage.patience_ms = PATIENCE_MS
    return TranscriptionProgram(
        Hearing(
            encode, decode, tokens, files.reference, Fallback(tokenizer.decode), align, open_warping(site), speller
        ),
        activity,
        encoder.samples,
        Desk(encode, decode, tokens, files.reference, encoder.frames, policy, align, pens),
    )
