"""What crosses between the front and the engine.

The text follows the work as `Piece`s, posted to the job's inbox in order; one with `last` ends it. Events of a job:
`Output(kind="spoken", body=core.speech.telling.Spoken)` per piece or pause, in order; `Ended(receipt)`, whose units are
phonemes in, frames out.
"""

from __future__ import annotations

import msgspec

RATE = 24_000
FRAME = 300
"""Samples of one of the model's frames."""


class SpeakWork(msgspec.Struct):
    """Checked: the model has the voice."""

    voice: str


class Piece(msgspec.Struct, omit_defaults=True):
    """Phonemes to say in one breath, as the model's ids, and the text they are read from; then a pause in seconds."""

    ids: list[int] = []
    text: str = ""
    pace: float = 1.0
    """Times the voice's own; checked."""
    pause: float = 0.0
    last: bool = False
