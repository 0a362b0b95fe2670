"""When what was heard cannot be trusted, and what is tried instead (Radford et al. 2022, section 4.5)."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

NO_SPEECH = 0.6
"""Probability of <|nospeech|> above which unsure text is taken for silence."""
UNSURE = -1.0
"""Mean logprob of a text, its end included, below which it is a guess."""
REPETITIVE = 2.4
"""Compression above which a text repeats itself."""


@dataclass(frozen=True)
class Attempt:
    """One text for a window; `tokens` are without the end. `repetition` is its compression."""

    tokens: list[int]
    temperature: float
    confidence: float
    repetition: float
    no_speech: float

    @property
    def silent(self) -> bool:
        """Text that repeats itself is no sign of silence: confidence alone counts."""
        return self.no_speech > NO_SPEECH and self.confidence < UNSURE

    @property
    def settled(self) -> bool:
        """Whether another attempt could not do better."""
        return self.silent or (self.confidence >= UNSURE and self.repetition <= REPETITIVE)


@dataclass(frozen=True)
class Fallback:
    """After a greedy attempt that is not settled: `draws` texts at each temperature, the surest of which counts."""

    decode: Callable[[list[int]], str]
    """Text of tokens, timestamps left out before."""
    temperatures: tuple[float, ...] = (0.2, 0.4, 0.6, 0.8, 1.0)
    draws: int = 5


def choose_attempt(tried: Sequence[Attempt]) -> Attempt:
    """The last, if it is settled; of nothing but doubtful ones the surest, rather one that does not repeat itself."""
    if tried[-1].settled:
        return tried[-1]
    return max(tried, key=lambda attempt: (attempt.repetition <= REPETITIVE, attempt.confidence))


def measure_repetition(text: str) -> float:
    """How much smaller the text gets when compressed."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
