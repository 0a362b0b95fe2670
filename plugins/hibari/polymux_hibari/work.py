"""What crosses between the front and the engine.

The text follows the work as `Piece`s, posted to the job's inbox in order. Events of a job: one
`Output(kind="spoken", body=Spoken)` per piece, in order; `Ended(receipt)`, whose units are phonemes in, frames out.
"""

from __future__ import annotations

import msgspec
import numpy as np

SPOKEN = "spoken"

RATE = 24_000
FRAME = 300
"""Samples of one of the model's frames."""


class SpeakWork(msgspec.Struct):
    """Checked: the model has the voice, and the speed is one it can speak at."""

    voice: str
    speed: float


class Piece(msgspec.Struct):
    """Phonemes to say in one breath, as the model's ids. An empty one ends the text."""

    ids: list[int]


class Spoken(msgspec.Struct):
    """The sound of one piece: int16, one channel, 24 kHz."""

    samples: np.ndarray
