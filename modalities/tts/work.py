"""What crosses between the fronts and the engine.

The text follows the work as `Piece`s, posted to the job's inbox in order; one with `last` ends it. Events of a job:
`Output(kind="spoken", body=core.speech.telling.Spoken)` in order; `Ended(receipt)`, whose units are ids in, frames out.
"""

from __future__ import annotations

import msgspec


class SpeakWork(msgspec.Struct):
    """Checked: the model has the voice."""

    speaker: int | None
    """For models that tell speakers apart by number."""
    seed: int


class WordSpan(msgspec.Struct, array_like=True):
    """Which ids of a piece a word is said by. `text` has the spacing that follows."""

    text: str
    first: int
    end: int


class Piece(msgspec.Struct, omit_defaults=True):
    """What is said in one breath, `pace` times as fast as the voice speaks, and the pause after it in seconds."""

    ids: list[int] = []
    words: list[WordSpan] = []
    pace: float = 1.0
    pause: float = 0.0
    last: bool = False
