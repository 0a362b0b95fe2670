"""Speech to write down: recordings, and sound that is still going on."""

from __future__ import annotations

import msgspec
import numpy as np

from polymux.core.arrival import ArrivingFile
from polymux.core.tasks.answers import Done
from polymux.core.tasks.language import TextDelta
from polymux.core.vocabulary import Task


class Transcribe(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A recording to write down in its own language, or, for the task `translate`, in English."""

    audio: bytes | str | ArrivingFile
    """A file's bytes, the path of one that stays until the last answer, or one that still arrives. What it is, its
    content says."""
    language: str | None = None
    """A code (en) or a name (english); None: detected."""
    prompt: str = ""
    """Text as if it came before: names, spelling, style."""
    temperature: float = 0.0
    """0: the likeliest text, and draws at rising temperatures where that one cannot be trusted."""
    hotwords: str = ""
    """Words to expect, in every part of the recording."""
    seek: bool = False
    """Write down one part after another, each from where the last one's timestamps end; otherwise the recording is cut
    where nobody speaks, and many parts are written down at once."""
    remembers: bool = False
    """With `seek`: what was said is the prompt of what follows."""
    words: bool = False
    """When each word is said is wanted."""
    threshold: float | None = None
    """How likely speech must be to count. None, here and below: the detector's default."""
    silence: float | None = None
    """Seconds of silence that end an utterance."""
    padding: float | None = None
    """Seconds that are kept before an utterance."""
    beam_size: int = 1
    """Texts that are followed at once at temperature 0 (beam search), the surest of which counts."""
    best_of: int | None = None
    """Texts that are drawn at a temperature above 0, the surest of which counts."""


class HeardWord(msgspec.Struct, array_like=True):
    """When a word was said, in seconds from the start of the recording."""

    text: str
    start: float
    end: float


class Segment(msgspec.Struct):
    """A stretch of speech, in seconds from the start of the recording; texts joined equal the joined `TextDelta`s."""

    id: int
    start: float
    end: float
    text: str
    tokens: list[int]
    seek: int
    """Where the window it was heard in begins, in hundredths of a second."""
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: list[HeardWord] = []
    """Empty where nobody asked for them."""


class Reached(msgspec.Struct):
    """How much of the recording is written down, in seconds from its start."""

    seconds: float


class Heard(msgspec.Struct):
    """The recording as a whole, before `Done`. `language` is its English name; `seconds` how long it lasts."""

    language: str
    seconds: float


class Turns(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """When somebody begins and ends to speak, as a voice activity detector hears it."""

    threshold: float = 0.5
    """From 0 to 1: how sure it must be that this is speech."""
    prefix_ms: int = 300
    """Sound before the speech that belongs to it."""
    silence_ms: int = 500
    """Silence that ends it."""


class Listen(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Speech to write down while it lasts. The sound follows as messages (`Answers.post`), until `Leave`.

    Another ask (`Answers.amend`) changes how what is not yet committed is heard.
    """

    language: str | None = None
    prompt: str = ""
    turns: Turns | None = None
    """None: the caller says where an utterance ends."""


class Hear(msgspec.Struct, tag="hear"):
    """The next samples: float32, one channel, `LISTEN_RATE` a second."""

    samples: np.ndarray


class Commit(msgspec.Struct, tag="commit"):
    """The utterance ends here: answered by `Committed`, or by `Uncommitted` when there is none."""


class Clear(msgspec.Struct, tag="clear"):
    """Forget the utterance that is under way: answered by `Cleared`."""


class Leave(msgspec.Struct, tag="leave"):
    """No sound follows. The job ends once all that was committed is written down."""


ListenMessage = Hear | Commit | Clear | Leave
LISTEN_RATE = 16_000


class SpeechStarted(msgspec.Struct):
    """Utterance `index` has begun, `seconds` into all sound so far; its prefix counts as its own."""

    index: int
    seconds: float


class SpeechStopped(msgspec.Struct):
    """Its silence was long enough; a `Committed` follows."""

    index: int
    seconds: float


class Committed(msgspec.Struct):
    """Utterance `index` is complete and lasts `seconds`; what it says follows, if it was not told already."""

    index: int
    seconds: float
    asked: bool = False
    """By `Commit`, rather than by silence."""


class Uncommitted(msgspec.Struct):
    """There was nothing to commit: only `seconds` of sound, or of it no speech."""

    seconds: float


class Cleared(msgspec.Struct):
    """The utterance that was under way, if any, is forgotten."""


class Listened(msgspec.Struct):
    """So many `seconds` of all the sound are dealt with, told about once a second: more than that waits."""

    seconds: float


class Understood(msgspec.Struct):
    """All of utterance `index`: its `TextDelta`s joined are `text`, which is empty where nobody spoke."""

    index: int
    text: str
    seconds: float


TRANSCRIBE = Task("transcribe", Transcribe, (TextDelta, Segment, Reached, Heard, Done))
TRANSLATE = Task("translate", Transcribe, (TextDelta, Segment, Reached, Heard, Done))
LISTEN = Task(
    "listen",
    Listen,
    (SpeechStarted, SpeechStopped, Committed, Uncommitted, Cleared, Listened, TextDelta, Understood, Done),
)
