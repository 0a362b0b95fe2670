"""Sound on its way out of the engine: pieces in order, with the times of the words in them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from polymux.core.tasks import SpokenWord

if TYPE_CHECKING:
    from polymux.core.engine.job import Job

SPOKEN = "spoken"
"""The kind of the `Output` that carries a `Spoken`."""


class Spoken(msgspec.Struct):
    """The next sound of a job: int16, one channel. `words` begin in it; their times are of the whole sound."""

    samples: np.ndarray
    words: list[SpokenWord] = []


class Teller:
    """Tells one job's sound, counts it, and puts words into the sound's own clock."""

    def __init__(self, job: Job, rate: int) -> None:
        self.rate = rate
        self._job = job
        self._samples = 0
        self._words: list[SpokenWord] = []

    @property
    def position(self) -> float:
        """Seconds told so far."""
        return self._samples / self.rate

    def expect(self, words: Iterable[SpokenWord], pace: float = 1.0) -> None:
        """Words of the sound that comes next, in seconds from here at a pace of 1. Each is told with the sound it
        begins in."""
        here = self.position
        self._words += (SpokenWord(word.text, here + word.start / pace, here + word.end / pace) for word in words)

    def tell(self, samples: np.ndarray) -> None:
        """int16 samples, or float ones from -1 to 1; none are told as nothing."""
        if not len(samples):
            return
        self._samples += len(samples)
        begun = sum(word.start < self.position for word in self._words)
        words, self._words = self._words[:begun], self._words[begun:]
        self._job.receipt.sound_seconds = self.position
        self._job.emit(SPOKEN, Spoken(quantize(samples), words))

    def pause(self, seconds: float) -> None:
        self.tell(np.zeros(round(seconds * self.rate), np.int16))


def quantize(samples: np.ndarray) -> np.ndarray:
    """int16, cut at full scale; what is no number is silent."""
    if samples.dtype == np.int16:
        return samples
    return np.rint(np.nan_to_num(samples, posinf=1.0, neginf=-1.0).clip(-1.0, 1.0) * 32767).astype(np.int16)


def share_words(text: str, seconds: float) -> list[SpokenWord]:
    """Words of a text that lasts so long, each for its share of the letters: what a voice can say that does not tell
    how long its sounds are."""
    words = split_words(text)
    total = sum(map(len, words))
    told, at = [], 0
    for word in words:
        told.append(SpokenWord(word, seconds * at / total, seconds * (at + len(word.rstrip())) / total))
        at += len(word)
    return told


def split_words(text: str) -> list[str]:
    """Words with the spacing that follows them; joined, they are the text. Leading space belongs to the first."""
    words: list[str] = []
    for part in text.split(" "):
        if words and not part:
            words[-1] += " "
        else:
            words.append(part + " ")
    words[-1] = words[-1][:-1]
    if len(words) > 1 and not words[0].strip():
        words[1] = words[0] + words[1]
        del words[0]
    return [word for word in words if word]
