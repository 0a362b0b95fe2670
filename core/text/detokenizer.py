"""Text from tokens as they arrive.

Joined, what `push` and `flush` return is the text of all pushed tokens decoded at once, as the continuation of the
context. A character that is spread over several tokens appears when it is complete. The context's text never
appears: if it ends inside a character, the answer starts with that character when the model completes it.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Sequence

from polymux.core.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"
LONGEST_CHARACTER = 4
"""Bytes of the longest UTF-8 sequence."""


class Detokenizer(ABC):
    """The text of one growing sequence of tokens."""

    @abstractmethod
    def push(self, id: int) -> str:
        """The text that this token completes, possibly none."""

    @abstractmethod
    def flush(self) -> str:
        """The text that was still held back. Nothing may be pushed afterwards."""


def open_detokenizer(
    tokenizer: Tokenizer, context: Sequence[int] = (), *, skip_special: bool = True, kept: frozenset[int] = frozenset()
) -> Detokenizer:
    """A detokenizer for tokens that continue `context`.

    `skip_special` leaves out the text of special tokens, but for those in `kept`.
    """
    kind = ByteDetokenizer if tokenizer.byte_level else WindowDetokenizer
    return kind(tokenizer, context, tokenizer.special_ids - kept if skip_special else frozenset())


class ByteDetokenizer(Detokenizer):
    """For byte-level vocabularies, where the text is the tokens' bytes joined: one UTF-8 decoder, no second look."""

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        tail = b""
        for id in reversed(context):
            tail = self._read(id) + tail
            if len(tail) >= LONGEST_CHARACTER:
                break
        self._decoder.decode(tail)
        self._inside = bool(self._decoder.getstate()[0])

    def push(self, id: int) -> str:
        return self._settle(self._decoder.decode(self._read(id)))

    def flush(self) -> str:
        return self._settle(self._decoder.decode(b"", final=True))

    def _read(self, id: int) -> bytes:
        return b"" if id in self._skipped else self._tokenizer.token_bytes(id)

    def _settle(self, text: str) -> str:
        """The first character after a context that ends inside one: if it stayed broken, it is the context's."""
        if self._inside and text:
            self._inside = False
            return text.removeprefix(REPLACEMENT)
        return text


class WindowDetokenizer(Detokenizer):
    """For every other vocabulary: decodes a short window twice, without and with the newest tokens.

    The window starts early enough that what a decoder does to the start of a text (SentencePiece drops a space)
    happens to both. While the newest token is a fallback byte, the run of bytes is not yet decided: it decodes as
    characters if all of it is valid, and as one U+FFFD per byte if not.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int], skipped: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._skipped = skipped
        self._window = self._find_anchor([id for id in context if id not in skipped])
        self._shown = self._decode()
        self._read = len(self._window)

    def push(self, id: int) -> str:
        if id in self._skipped or not self._tokenizer.knows(id):
            return ""  # decoding leaves it out; a window of nothing else would only grow
        self._window.append(id)
        if id in self._tokenizer.byte_ids:
            return ""
        text = self._decode()
        return "" if text.endswith(REPLACEMENT) and self._pending() else self._advance(text)

    def flush(self) -> str:
        return self._advance(self._decode())

    def _decode(self, start: int = 0) -> str:
        return self._tokenizer.decode(self._window[start:], skip_special=False)

    def _pending(self) -> bool:
        """Whether the newest tokens may still be pieces of one character: no more of them than it has bytes."""
        return len(self._window) - self._read < LONGEST_CHARACTER

    def _advance(self, text: str) -> str:
        shown = self._shown
        if not text.startswith(shown):
            shown = shown.rstrip(REPLACEMENT)
        new = text[len(shown) :]
        if new:
            tail = self._decode(self._read)
            if tail:
                del self._window[: self._read]
                self._shown = tail
            else:
                self._shown = text
            self._read = len(self._window)
        return new

    def _find_anchor(self, context: list[int]) -> list[int]:
        """The shortest useful end of the context: some text to start from, then the bytes of an unfinished
        character if there are any (complete ones before them must not be dragged down when it stays broken)."""
        end = len(context)
        while end and context[end - 1] in self._tokenizer.byte_ids:
            end -= 1
        run = b"".join(map(self._tokenizer.token_bytes, context[end:]))
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(run)
        unfinished = len(decoder.getstate()[0])
        kept = context[len(context) - unfinished :]
        length = 1
        while True:
            start = max(end - length, 0)
            before = context[start:end]
            if start == 0 or self._tokenizer.decode(before, skip_special=False):
                return before + kept
            length *= 2
