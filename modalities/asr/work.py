"""What crosses between the front and the engine.

The recording follows the work as `AudioChunk`s, posted to the job's inbox in order; one with `last` ends it. Events of
a job, in order: one `Output(kind="window", body=WindowText)` per window that holds speech, in the recording's order,
and after each window, with speech or not, `Output(kind="reached", body=tasks.Reached)`;
`Output(kind="heard", body=tasks.Heard)` with the language's code; `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from polymux.core.tasks import Cleared, Committed, Listened, SpeechStarted, SpeechStopped, Turns, Uncommitted
from polymux.modalities.asr.utterances import Endpointing

WINDOW = "window"
REACHED = "reached"
HEARD = "heard"


class TranscribeWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Everything is checked: ids are the model's own."""

    language: str | None = None
    """A code that the model knows; None: detect it."""
    prompt: list[int] = []
    """Text as if it came before; with `hotwords` it leaves room for an answer."""
    hotwords: list[int] = []
    """Text that stands before what came before, in every window."""
    temperature: float = 0.0
    seek: bool = False
    """One window after another, each from where the last one's timestamps end; otherwise windows are cut where nobody
    speaks, and many are decoded at once."""
    remembers: bool = False
    """With `seek`: what was said before a window is its prompt."""
    words: bool = False
    """When each word is said is wanted."""
    endpointing: Endpointing = Endpointing()
    beam_size: int = 1
    """Texts that are followed at once at temperature 0, the surest of which counts."""
    best_of: int | None = None
    """Texts drawn at a temperature above 0, the surest of which counts. None: the model's default."""


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
    language: str = ""
    """The code of the language it was heard in."""
    bounds: list[float] = []
    """Seconds from the window's start, one more than there are text tokens: token k is said between bounds k and
    k + 1. Empty where nobody asked for words."""
    ends: list[float] = []
    """Where text token k ends, if it is known better than that: bounds are then as many as text tokens."""


class ListenWork(msgspec.Struct, kw_only=True, omit_defaults=True, tag="amend"):
    """Everything is checked. Sent again to a running job, it counts for what is not yet committed."""

    language: str | None = None
    """A code that the model knows; None: detect it, once per utterance."""
    prompt: list[int] = []
    """Text as if it came before."""
    turns: Turns | None = None


class Written(msgspec.Struct, array_like=True):
    """More text tokens of utterance `index`, never taken back. The `last` ones come with its length."""

    index: int
    tokens: list[int]
    last: bool = False
    seconds: float = 0.0


LISTENED: dict[str, type[msgspec.Struct]] = {
    kind.__name__: kind for kind in (SpeechStarted, SpeechStopped, Committed, Uncommitted, Cleared, Listened, Written)
}
"""What a listening job emits, each under its own name: all but `Written` are answers as they are."""
