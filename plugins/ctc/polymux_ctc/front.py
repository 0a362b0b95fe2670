"""The half without a device: files become samples, classes become words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Transcribe
from polymux_ctc.audio import read_stretches
from polymux_ctc.presenter import Spelling, TranscriptPresenter, WordsPresenter
from polymux_ctc.work import RATE, CtcWork, Stretch, Words

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

SHORTEST = 400
"""Samples that the first convolutions need."""


class CtcFront(Front):
    def __init__(self, spelling: Spelling, normalize: bool) -> None:
        self.spelling = spelling
        self.normalize = normalize

    @classmethod
    def load(cls, files: ModelFiles) -> CtcFront:
        """Raises `ModelError` without a vocabulary."""
        vocabulary = files.json("vocab.json")
        if not vocabulary or not all(isinstance(id, int) for id in vocabulary.values()):
            raise ModelError(f"{files.reference}: vocab.json is missing or maps no letters to numbers")
        blank = files.config().get("pad_token_id") or 0
        delimiter = files.json("tokenizer_config.json").get("word_delimiter_token") or "|"
        normalize = files.json("preprocessor_config.json").get("do_normalize", True)
        return cls(Spelling({id: piece for piece, id in vocabulary.items()}, blank, delimiter), bool(normalize))

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        """Reads the first stretch, so that a file that cannot be read is refused before any answer."""
        if isinstance(ask, Words):
            audio: bytes | str = ask.file
        elif isinstance(ask, Transcribe) and task == "transcribe":
            audio = ask.audio
            if ask.prompt or ask.temperature:
                raise InvalidRequest("this model takes neither a prompt nor a temperature", param="prompt")
        else:
            raise InvalidRequest(f"This model does not serve {task}.")
        stretches = read_stretches(audio)
        first = next(stretches, None)
        if first is None:
            raise InvalidRequest("the recording is empty", param="file")
        return Prepared(CtcWork(), messages=self._post(itertools.chain([first], stretches)))

    def _post(self, stretches: Iterator[np.ndarray]) -> Iterator[Stretch]:
        for samples in stretches:
            if self.normalize:
                samples = (samples - samples.mean()) / np.sqrt(samples.var() + 1e-7)
            if len(samples) < SHORTEST:
                samples = np.pad(samples, (0, SHORTEST - len(samples)))
            yield Stretch(samples.astype(np.float32))
        yield Stretch(np.zeros(0, np.float32), last=True)

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        if task == "words":
            return WordsPresenter(self.spelling)
        return TranscriptPresenter(self.spelling, getattr(ask, "language", None) or "unknown")

    def describe(self) -> dict[str, Any]:
        return {"sample_rate": RATE, "letters": len(self.spelling.pieces)}
