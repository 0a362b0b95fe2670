"""Word times by a CTC model, finer than the attention's: an option of whoever serves the recogniser.

The model hears the window once more, and what was written is laid into what it heard, letter by letter.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCTC

from polymux.core.batch.oneshot import OneShotModel, OneShotRow, OneShotStage
from polymux.core.engine.job import Job
from polymux.core.engine.site import Site
from polymux.core.errors import ModelError
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.letters import Alphabet, Spelling, align, spell_tokens, time_tokens
from polymux.modalities.asr.utterances import RATE

SHORTEST = RATE // 20
"""Samples that the model is given at least; shorter windows are filled up with silence."""


class LetterModel(OneShotModel):
    """Samples in, log probabilities (frames, classes) of letters out."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model.eval().requires_grad_(False)
        self._device = next(model.parameters()).device

    def compatible(self, first: Any, item: Any) -> bool:
        return len(first) == len(item)  # models without an attention mask would hear the padding

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Tensor]:
        samples = torch.from_numpy(np.stack(items)).to(self._device)
        samples = (samples - samples.mean(-1, keepdim=True)) / (samples.var(-1, keepdim=True) + 1e-7).sqrt()
        return list(self._model(samples).logits.float().log_softmax(-1))


@dataclass(frozen=True)
class Sheet:
    """What was heard of letters, and what was written."""

    logprobs: np.ndarray
    spelling: Spelling


class LetterAligner(OneShotModel):
    """`Sheet`s in; for each the frames of its tokens, or None where the text does not fit. Runs on the host."""

    def __init__(self, blank: int) -> None:
        self._blank = blank

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[tuple[list[float], list[float]] | None]:
        return [self._time(item) for item in items]

    def _time(self, sheet: Sheet) -> tuple[list[float], list[float]] | None:
        spans = align(sheet.logprobs, sheet.spelling.classes, self._blank)
        return None if spans is None else time_tokens(sheet.spelling, spans, len(sheet.logprobs))


class Speller:
    """`stages` are those of the program that has it."""

    def __init__(self, model: torch.nn.Module, alphabet: Alphabet, tokenizer: Tokenizer, site: Site) -> None:
        self._alphabet = alphabet
        self._tokenizer = tokenizer
        self._hear = OneShotStage("letters", LetterModel(model), site, max_units=8, max_rows=8, to_host=True)
        self._align = OneShotStage("spell", LetterAligner(alphabet.blank), site, max_units=8, on_host=True)
        self.stages = (self._hear, self._align)

    @classmethod
    def load(cls, folder: Path, tokenizer: Tokenizer, site: Site) -> Speller:
        """Raises `ModelError` when the folder holds no CTC model of transformers with letters."""
        alphabet = Alphabet.load(folder)
        try:
            model = AutoModelForCTC.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)
        except (OSError, ValueError, RuntimeError) as error:
            raise ModelError(f"cannot load a CTC model from {folder}: {error}") from error
        return cls(model.to(site.device.torch), alphabet, tokenizer, site)

    async def time(
        self, job: Job, samples: np.ndarray, tokens: Sequence[int]
    ) -> tuple[list[float], list[float]] | None:
        """Where each text token begins and ends, in seconds of the window; None where no letter of the text can be
        laid into it."""
        spelling = spell_tokens(tokens, self._tokenizer, self._alphabet)
        if not spelling.classes:
            return None
        padded = np.pad(samples, (0, max(0, SHORTEST - len(samples))))
        heard = await job.start(self._hear, OneShotRow(job, padded, 1))
        aligned = await job.start(self._align, OneShotRow(job, Sheet(heard.result.numpy(), spelling), 1))
        if aligned.result is None:
            return None
        second = len(padded) / len(heard.result) / RATE
        starts, ends = aligned.result
        return [frame * second for frame in starts], [frame * second for frame in ends]
