"""The device-free half of transcription: files become samples, tokens become text with times."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Listen, Transcribe
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.audio import RATE, read_audio
from polymux.modalities.asr.dictated import DictationPresenter
from polymux.modalities.asr.languages import find_language
from polymux.modalities.asr.presenter import TranscriptPresenter
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.utterances import Endpointing
from polymux.modalities.asr.work import AudioChunk, ListenWork, TranscribeWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

CHUNK_SECONDS = 30
MOST_DRAWS = 16
"""Texts of one window at once: beams, or draws."""

ENGLISH = {"en": -1}
"""What a model without language tokens knows."""


class TranscribeFront(Front):
    """Transcription and translation with one Whisper model. `context` is the decoder's, in tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: SpeechTokens, context: int) -> None:
        self.tokenizer = tokenizer
        self.tokens = tokens
        self.context = context

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> TranscribeFront:
        """Raises `ModelError` when a file is missing or is not a Whisper model's."""
        context = files.config().get("max_target_positions")
        if not isinstance(context, int):
            raise ModelError(f"{files.reference}: config.json does not say max_target_positions")
        tokenizer = Tokenizer.load(files)
        return cls(tokenizer, SpeechTokens.load(files, tokenizer), context)

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Reads the first half minute, so that a file that cannot be read is refused before any answer."""
        if isinstance(ask, Listen):
            return Prepared(
                ListenWork(language=self._find(ask), prompt=self._spell(ask.prompt, "prompt"), turns=ask.turns)
            )
        if not isinstance(ask, Transcribe):
            raise InvalidRequest(f"This model does not serve {task}.")
        if task == "translate" and not self.tokens.multilingual:
            raise InvalidRequest("this model knows English alone and cannot translate into it", param="model")
        check_options(ask)
        hotwords, prompt = self._read_told(ask)
        defaults = Endpointing()
        work = TranscribeWork(
            language=self._find(ask),
            prompt=prompt,
            hotwords=hotwords,
            temperature=ask.temperature,
            seek=ask.seek or ask.remembers,
            remembers=ask.remembers,
            words=ask.words,
            endpointing=Endpointing(
                threshold=defaults.threshold if ask.threshold is None else ask.threshold,
                silence=defaults.silence if ask.silence is None else ask.silence,
                padding=defaults.padding if ask.padding is None else ask.padding,
            ),
            beam_size=ask.beam_size,
            best_of=ask.best_of,
        )
        chunks = gather_chunks(read_audio(ask.audio), CHUNK_SECONDS * RATE)
        return Prepared(work, messages=itertools.chain([next(chunks)], chunks))

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        if isinstance(ask, Listen):
            return DictationPresenter(self.tokenizer)
        return TranscriptPresenter(self.tokenizer, self.tokens)

    def describe(self) -> dict[str, Any]:
        return {"sample_rate": RATE, "languages": sorted(self.tokens.languages or ENGLISH)}

    def _find(self, ask: Transcribe | Listen) -> str | None:
        return None if ask.language is None else find_language(ask.language, self.tokens.languages or ENGLISH)

    def _read_told(self, ask: Transcribe) -> tuple[list[int], list[int]]:
        """Hotwords and the end of the prompt, as much as was trained: half the context less what the answer begins
        with. Hotwords come first and take at most half of it."""
        room = self.context // 2 - 1
        hotwords = self._spell(ask.hotwords, "hotwords")[: room // 2]
        room -= len(hotwords)
        prompt = self._spell(ask.prompt, "prompt")
        return hotwords, prompt[max(0, len(prompt) - room) :]

    def _spell(self, text: str, name: str) -> list[int]:
        words = text.strip()
        ids = self.tokenizer.encode(f" {words}", special=False) if words else []
        if any(id >= self.tokens.end for id in ids):
            raise InvalidRequest(f"{name} spells a special token of this model", param=name)
        return ids


def check_options(ask: Transcribe) -> None:
    """Raises `InvalidRequest` for a number that is out of its range."""
    ranges = {
        "temperature": (ask.temperature, 0.0, 1.0),
        "threshold": (ask.threshold, 0.0, 1.0),
        "silence": (ask.silence, 0.0, 30.0),
        "padding": (ask.padding, 0.0, 30.0),
        "beam_size": (ask.beam_size, 1, MOST_DRAWS),
        "best_of": (ask.best_of, 1, MOST_DRAWS),
    }
    for name, (value, low, high) in ranges.items():
        if value is not None and not (math.isfinite(value) and low <= value <= high):
            raise InvalidRequest(f"{name} must be from {low:g} to {high:g}", param=name)


def gather_chunks(pieces: Iterator[np.ndarray], count: int) -> Iterator[AudioChunk]:
    """Pieces of any length as chunks of `count` samples; the one that is marked as the last may be shorter or empty."""
    held: list[np.ndarray] = []
    length = 0
    for piece in pieces:
        held.append(piece)
        length += len(piece)
        while length >= count:
            joined = np.concatenate(held)
            yield AudioChunk(joined[:count], last=False)
            held, length = [joined[count:]], length - count
    yield AudioChunk(np.concatenate(held) if held else np.empty(0, np.float32), last=True)
