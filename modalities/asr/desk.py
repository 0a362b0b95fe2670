"""What all scribes of a model share: its stages, the rules of their rows, and how short a window may be."""

from __future__ import annotations

from collections.abc import Callable

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.rules import Only, Suppress, SuppressFirst
from polymux.modalities.asr.features import HOP, RATE
from polymux.modalities.asr.pens import Pens
from polymux.modalities.asr.policies import Policy
from polymux.modalities.asr.tokens import SpeechTokens
from polymux.modalities.asr.whisper import STRIDE

MARGIN = RATE
"""Samples of silence behind the sound, at least: the model was trained on windows that end in it."""
PARTS, FINAL_PARTS = 5, 3
"""The window is shortened to no less than such a part of the model's own; where words are last words, less so."""


class Desk:
    """`frames` are the encoder's positions, 20 ms each."""

    def __init__(
        self,
        encoder: OneShotStage,
        decoder: TokenStage,
        tokens: SpeechTokens,
        reference: str,
        frames: int,
        open_policy: Callable[[], Policy],
        align: OneShotStage,
        pens: Pens | None = None,
    ) -> None:
        self.encoder = encoder
        self.decoder = decoder
        self.tokens = tokens
        self.reference = reference
        self.frames = frames
        self.open_policy = open_policy
        self.align = align
        self.pens = pens or Pens()
        vocabulary = decoder.model.shape.vocabulary
        never = (*tokens.suppressed, *range(tokens.no_timestamps, vocabulary))
        self.languages = Only(tuple(tokens.languages.values()))
        self.rules = (Suppress(never),)
        self.first_rules = (SuppressFirst(tokens.suppressed_first), *self.rules)
        """Where nothing was told yet."""

    @property
    def longest(self) -> int:
        """Samples that a window holds beside its margin."""
        return self.frames * STRIDE * HOP - min(MARGIN, self.frames * STRIDE * HOP // 2)

    def choose_frames(self, count: int, *, final: bool) -> int:
        """The shortest window for `count` samples: the model's own length, or an even part of it."""
        for parts in range(FINAL_PARTS if final else PARTS, 1, -1):
            frames = self.frames // parts
            if not self.frames % parts and frames * STRIDE * HOP >= count + MARGIN:
                return frames
        return self.frames
