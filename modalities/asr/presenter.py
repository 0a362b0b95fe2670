"""Windows of tokens become segments with text and times, in the recording's own clock."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Presenter
from polymux.core.tasks import Done, Heard, HeardWord, Reached, Segment, TextDelta
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.asr.audio import RATE
from polymux.modalities.asr.fallback import measure_repetition
from polymux.modalities.asr.languages import name_language
from polymux.modalities.asr.tokens import STAMP_SECONDS, SpeechTokens
from polymux.modalities.asr.words import split_words, time_words
from polymux.modalities.asr.work import HEARD, REACHED, WINDOW, WindowText

SHORTEST = 0.02
"""Seconds; no segment ends where it begins."""


@dataclass(frozen=True)
class Stretch:
    """Text tokens between two timestamps, in seconds from the start of their window."""

    start: float
    end: float
    tokens: list[int]


class TranscriptPresenter(Presenter):
    """Tells each window's segments as it comes, each as a `TextDelta` and a `Segment`."""

    def __init__(self, tokenizer: Tokenizer, tokens: SpeechTokens) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._segments = 0
        self._seconds = 0.0

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == WINDOW:
                return list(self._tell(unpack(body, WindowText)))
            case Output(kind=kind, body=body) if kind == REACHED:
                return [unpack(body, Reached)]
            case Output(kind=kind, body=body) if kind == HEARD:
                heard = unpack(body, Heard)
                self._seconds = heard.seconds
                return [Heard(name_language(heard.language), heard.seconds)]
            case Ended(receipt=receipt):
                usage = Usage(
                    input_tokens=receipt.input_units, output_tokens=receipt.output_units, seconds=self._seconds
                )
                return [Done(usage, receipt)]
        return []

    def _tell(self, window: WindowText) -> Iterator[msgspec.Struct]:
        offset = window.start / RATE
        stretches = list(split_stretches(window.tokens, self._tokens.first_stamp, window.count / RATE))
        for stretch, words in zip(stretches, self._time(window, stretches)):
            text = self._tokenizer.decode(stretch.tokens)
            if not text.strip():
                continue
            if not self._segments:
                text = text.lstrip()  # the first word's space would begin the whole text
            yield TextDelta(index=0, text=text)
            yield Segment(
                id=self._segments,
                start=round(offset + stretch.start, 3),
                end=round(offset + stretch.end, 3),
                text=text,
                tokens=stretch.tokens,
                seek=window.start * 100 // RATE,
                temperature=window.temperature,
                avg_logprob=window.avg_logprob,
                compression_ratio=measure_repetition(text),
                no_speech_prob=window.no_speech_prob,
                words=words,
            )
            self._segments += 1

    def _time(self, window: WindowText, stretches: list[Stretch]) -> list[list[HeardWord]]:
        """Each stretch's words, in the recording's own time."""
        if not window.bounds:
            return [[] for _ in stretches]
        split = [split_words(stretch.tokens, self._tokenizer, window.language) for stretch in stretches]
        everything = [word for words in split for word in words]
        timed = iter(time_words(everything, window.bounds, window.count / RATE, window.ends))
        offset = window.start / RATE
        return [
            [
                HeardWord(word.text, round(offset + word.start, 3), round(offset + word.end, 3))
                for word in itertools.islice(timed, len(words))
                if word.text
            ]
            for words in split
        ]


def split_stretches(tokens: list[int], first_stamp: int, seconds: float) -> Iterator[Stretch]:
    """Every text token of a window lands in one stretch; times are clipped to the window's `seconds`, and rise.

    A timestamp before text is where it begins, one after it where it ends. Text whose end was never said lasts until
    the window does: the window was cut where it is quiet.
    """
    held: list[int] = []
    start = 0.0
    floor = 0.0
    for token in [*tokens, None]:
        if token is not None and token < first_stamp:
            held.append(token)
            continue
        stamp = seconds if token is None else min((token - first_stamp) * STAMP_SECONDS, seconds)
        if held:
            begin = min(max(start, floor), max(seconds - SHORTEST, 0.0))
            end = max(stamp, begin + SHORTEST)
            yield Stretch(begin, end, held)
            held, floor = [], min(end, seconds)
        start = stamp
