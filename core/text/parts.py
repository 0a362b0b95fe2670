"""What an answer's text consists of, read as it grows: thoughts, words for the user, calls of tools.

A reader is told text and gives back parts; parts of a kind joined are the same however the text was cut. A part's
`end` is where it ends in the whole text, so that tokens can be matched to what was told of them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

Kind = Literal["text", "thought", "call", "arguments"]


@dataclass(frozen=True)
class Part:
    """`text`, of kind call: the tool's name; of kind arguments: more of the latest call's JSON."""

    kind: Kind
    text: str
    end: int


class Reader(ABC):
    """Reads one answer."""

    thinking = False
    """Whether a thought is open."""
    called = False
    """Whether a tool was called."""

    @property
    @abstractmethod
    def held(self) -> int:
        """Characters at the end of the text so far that no part tells yet."""

    @abstractmethod
    def push(self, text: str, end: int) -> list[Part]:
        """The answer goes on with `text`, up to place `end` of the whole."""

    @abstractmethod
    def flush(self, end: int) -> list[Part]:
        """The answer is over: what was held back."""


class PlainReader(Reader):
    """All of it is for the user."""

    held = 0

    def push(self, text: str, end: int) -> list[Part]:
        return [Part("text", text, end)] if text else []

    def flush(self, end: int) -> list[Part]:
        return []


class ThoughtReader(Reader):
    """A thought between two marks, then what another reader reads. White space around a thought belongs to neither.

    `inside`: the prompt has already opened the thought.
    """

    def __init__(self, begin: str, end: str, answer: Reader, *, inside: bool) -> None:
        self._begin = begin
        self._end = end
        self._answer = answer
        self._opening = not inside
        self.thinking = inside
        self._buffer = ""
        self._blank = inside
        """Nothing but white space came since the last mark."""

    @property
    def held(self) -> int:
        return len(self._buffer) + self._answer.held

    @property
    def called(self) -> bool:  # type: ignore[override]
        return self._answer.called

    def push(self, text: str, end: int) -> list[Part]:
        self._buffer += text
        if self._opening and not self._open():
            return []
        parts = self._think(end) if self.thinking else []
        return parts if self.thinking else parts + self._pass(end)

    def flush(self, end: int) -> list[Part]:
        parts = []
        if self.thinking:
            thought = self._buffer.strip() if self._blank else self._buffer.rstrip()
            parts = [Part("thought", thought, end)] if thought else []
        elif self._buffer:
            parts = self._answer.push(self._buffer, end)
        self._buffer = ""
        return parts + self._answer.flush(end)

    def _open(self) -> bool:
        """Whether it is known if the answer begins with a thought."""
        head = self._buffer.lstrip()
        if len(head) < len(self._begin) and self._begin.startswith(head):
            return False
        self._opening = False
        if head.startswith(self._begin):
            self.thinking = self._blank = True
            self._buffer = head[len(self._begin) :]
        return True

    def _think(self, end: int) -> list[Part]:
        before, after = split_at(self._buffer, self._end)
        thought = before.rstrip()
        self._buffer = self._buffer[len(thought) :] if after is None else after
        told = end - len(self._buffer)
        if self._blank:
            thought = thought.lstrip()
        if thought:
            self._blank = False
        if after is not None:
            self.thinking, self._blank = False, True
        return [Part("thought", thought, told)] if thought else []

    def _pass(self, end: int) -> list[Part]:
        text, self._buffer = self._buffer, ""
        if self._blank:
            text = text.lstrip()
            self._blank = not text
        return self._answer.push(text, end) if text else []


def split_at(text: str, mark: str) -> tuple[str, str | None]:
    """What comes before the mark and after it; without one, what surely comes before it, and None."""
    before, found, after = text.partition(mark)
    if found:
        return before, after
    for length in range(min(len(mark) - 1, len(text)), 0, -1):
        if text.endswith(mark[:length]):
            return text[:-length], None
    return text, None
