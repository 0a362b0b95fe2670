"""The wire of the task `words`, and what crosses between the front and the engine."""

from __future__ import annotations

import msgspec
import numpy as np
from pydantic import BaseModel

from polymux.core.tasks import Done
from polymux.core.vocabulary import Route, Task

RATE = 16_000


class Words(msgspec.Struct):
    """A recording, as the path where it lies."""

    file: str


class Word(msgspec.Struct):
    """A word with its times in seconds from the start; `confidence` is the geometric mean over its letters, 0 to 1."""

    word: str
    start: float
    end: float
    confidence: float


class WordsRequest(BaseModel):
    """The fields of the form, beside its file."""

    model: str


class WordFrame(BaseModel):
    """One event of the stream."""

    word: str
    start: float
    end: float
    confidence: float


WORDS = Task(
    "words",
    Words,
    (Word, Done),
    Route(
        "POST",
        "/v1/audio/words",
        WordsRequest,
        WordFrame,
        stream="sse",
        upload="file",
        summary="Words with their times",
    ),
)


class CtcWork(msgspec.Struct):
    """The recording follows in stretches; normalised already."""


class Stretch(msgspec.Struct):
    """Samples, float32, 16 kHz. `last` ends the recording; it may be empty then."""

    samples: np.ndarray
    last: bool = False


class Spelled(msgspec.Struct):
    """The likeliest class of each frame of one stretch, and its log probability. `samples` is the stretch's length."""

    ids: np.ndarray
    logprobs: np.ndarray
    samples: int
