"""Texts to say aloud."""

from __future__ import annotations

import msgspec

from polymux.core.tasks.answers import Done
from polymux.core.vocabulary import Task


class Speak(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text to say aloud. How the sound is encoded is the caller's matter: the answers are samples."""

    text: str
    voice: str | None = None
    """A name that the model lists, or one that `core.text.voices` knows; None: the model's default."""
    speed: float = 1.0
    """0.25 to 4 times the voice's own pace, at the same pitch."""
    kind: str = "text"
    """What `text` is: text, ssml (the elements that `core.text.ssml` knows) or phonemes in the voice's own alphabet."""
    seed: int | None = None
    """Of what is drawn; the same seed gives the same sound. None: drawn, where the voice draws at all."""


class SpokenWord(msgspec.Struct, array_like=True):
    """When a word is said, in seconds from the beginning of the whole sound. `text` has the spacing that follows."""

    text: str
    start: float
    end: float


class Sound(msgspec.Struct):
    """The next stretch of sound, one channel; stretches joined are the whole. Told as soon as it is known."""

    data: bytes
    """Little-endian int16."""
    rate: int
    """Samples a second, the same for all stretches of one answer."""
    words: list[SpokenWord] = []
    """Words that begin in this stretch, in order; empty where the voice cannot tell. Joined over an answer, their
    texts are the text that was said."""


SPEAK = Task("speak", Speak, (Sound, Done))
