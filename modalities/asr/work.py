"""What crosses between the front and the engine.

The recording follows the work as `AudioChunk`s, posted to the job's inbox in order; one with `last` ends it. Events of
a job, in order: one `Output(kind="window", body=WindowText)` per window that holds speech, in the recording's order;
`Output(kind="heard", body=tasks.Heard)` with the language's code; `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec
import numpy as np

WINDOW = "window"
HEARD = "heard"


class TranscribeWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything is checked: ids are the model's own."""

    language: str | None = None
    """A code that the model knows; None: detect it."""
    prompt: list[int] = []
    """What comes before <|startoftranscript|>; it leaves room for an answer."""
    temperature: float = 0.0


class AudioChunk(msgspec.Struct):
    """The next samples: float32, one channel, 16 kHz."""

    samples: np.ndarray
    last: bool


class WindowText(msgspec.Struct, array_like=True):
    """What one window says. `start` and `count` are samples of the recording."""

    start: int
    count: int
    tokens: list[int]
    """Text and timestamps, without the end."""
    temperature: float
    avg_logprob: float
    no_speech_prob: float
