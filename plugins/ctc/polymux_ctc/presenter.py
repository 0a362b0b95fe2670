"""From the likeliest class of every frame to words with times, and to a transcript."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Presenter
from polymux.core.tasks import Done, Heard, Segment, TextDelta
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux_ctc.work import RATE, Spelled, Word


@dataclass(frozen=True)
class Spelling:
    """Classes as text. `blank` stands between letters, `delimiter` between words."""

    pieces: dict[int, str]
    blank: int
    delimiter: str

    def read(self, spelled: Spelled, offset: float) -> Iterator[Word]:
        """Greedy CTC: runs of a class are one letter, blanks none. Marks (`<s>`) are not there at all: what stands on
        both sides of one is a single run."""
        seconds = spelled.samples / RATE / max(len(spelled.ids), 1)
        word, start, end, scores = "", 0.0, 0.0, list[float]()
        heard = [(frame, id) for frame, id in enumerate(spelled.ids.tolist()) if id == self.blank or self._spells(id)]
        for id, run in groupby(heard, key=itemgetter(1)):
            frames = [frame for frame, _ in run]
            if id == self.blank:
                continue
            if self.pieces[id] == self.delimiter:
                if word:
                    yield Word(word, start, end, math.exp(sum(scores) / len(scores)))
                word, scores = "", []
                continue
            start = start if word else offset + frames[0] * seconds
            word += self.pieces[id]
            end = offset + (frames[-1] + 1) * seconds
            scores.append(float(spelled.logprobs[frames].max()))
        if word:
            yield Word(word, start, end, math.exp(sum(scores) / len(scores)))

    def _spells(self, id: int) -> bool:
        return not self.pieces.get(id, "<").startswith("<")


class WordsPresenter(Presenter):
    """Every word as soon as its stretch is spelled."""

    def __init__(self, spelling: Spelling) -> None:
        self.spelling = spelling
        self.samples = 0

    def read(self, event: Output) -> list[Word]:
        spelled = unpack(event.body, Spelled)
        words = list(self.spelling.read(spelled, self.samples / RATE))
        self.samples += spelled.samples
        return words

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output():
                return list(self.read(event))
            case Ended(receipt=receipt):
                return [Done(Usage(seconds=self.samples / RATE), receipt)]
        return []


class TranscriptPresenter(WordsPresenter):
    """The answers of the task `transcribe`: a segment for each stretch."""

    def __init__(self, spelling: Spelling, language: str) -> None:
        super().__init__(spelling)
        self.language = language
        self.segments = 0

    def feed(self, event: Event) -> list[msgspec.Struct]:
        if isinstance(event, Output):
            words = self.read(event)
            if not words:
                return []
            text = " ".join(word.word for word in words)
            text = f" {text}" if self.segments else text
            confidence = sum(math.log(word.confidence) for word in words) / len(words)
            segment = Segment(
                id=self.segments,
                start=words[0].start,
                end=words[-1].end,
                text=text,
                tokens=[],
                seek=0,
                temperature=0.0,
                avg_logprob=confidence,
                compression_ratio=1.0,
                no_speech_prob=0.0,
            )
            self.segments += 1
            return [TextDelta(0, text), segment]
        if isinstance(event, Ended):
            return [Heard(self.language, self.samples / RATE), *super().feed(event)]
        return []
