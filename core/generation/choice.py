"""One choice of an answer on its way to the caller: tokens in, parts of an answer out, cut at the first stop string."""

from __future__ import annotations

from collections import deque

from polymux.core.tasks import TokenLogprob
from polymux.core.text.detokenizer import Detokenizer
from polymux.core.text.parts import Part, Reader
from polymux.core.text.stops import StopStrings


class Choice:
    """Stop strings are looked for in what is said to the user, not in thoughts or arguments."""

    def __init__(self, index: int, detokenizer: Detokenizer, reader: Reader, stops: StopStrings) -> None:
        self.index = index
        self.detokenizer = detokenizer
        self.reader = reader
        self.stops = stops
        self.tokens = 0
        self.thought_tokens = 0
        self.calls = 0
        self.reason: str | None = None
        self._read = 0
        """Characters detokenised."""
        self._shown = 0
        """Characters whose part of the answer is told."""
        self._scores: deque[tuple[int, TokenLogprob]] = deque()
        """Logprobs waiting for their token's text, with the character it begins at."""

    def grow(self, piece: str, score: TokenLogprob | None) -> list[Part]:
        """One more token with the text it completes; returns what may be told now."""
        self.tokens += 1
        if score is not None:
            self._scores.append((self._read, score))
        thinking = self.reader.thinking
        parts = self._push(piece)
        self.thought_tokens += thinking or self.reader.thinking
        return parts

    def finish(self) -> list[Part]:
        """No more tokens: what was held back is told."""
        parts = self._push(self.detokenizer.flush())
        parts += self._tell(self.reader.flush(self._read))
        rest = self.stops.flush()
        if self.stops.matched is None:
            self._shown = self._read
        return [*parts, Part("text", rest, self._read)] if rest else parts

    def take_scores(self) -> list[TokenLogprob]:
        """The logprobs of tokens whose text is told; at the end of a text that no stop string cut, of all."""
        whole = self.reason is not None and self.stops.matched is None
        taken = []
        while self._scores and (whole or self._scores[0][0] < self._shown):
            taken.append(self._scores.popleft()[1])
        return taken

    def _push(self, piece: str) -> list[Part]:
        self._read += len(piece)
        return self._tell(self.reader.push(piece, self._read)) if piece else []

    def _tell(self, parts: list[Part]) -> list[Part]:
        told: list[Part] = []
        for part in parts:
            if self.stops.matched is not None:
                return told
            if part.kind != "text":
                rest = self.stops.flush()
                told += [Part("text", rest, part.end), part] if rest else [part]
                continue
            unseen = self.stops.held + len(part.text)
            text = self.stops.push(part.text)
            if text:
                told.append(Part("text", text, part.end))
            if self.stops.matched is not None:
                self._shown = part.end - (unseen - len(text))
                return told
        if self.stops.matched is None:
            self._shown = self._read - self.reader.held - self.stops.held
        return told
