"""Tokens become words, and the bounds between tokens the times of words."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from polymux.core.tasks import HeardWord
from polymux.core.text.tokenizer import Tokenizer

UNSPACED = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
"""Languages that put no space between words: every character counts as one."""

OPENING = frozenset("\"'“‘¿¡([{«-")
SENTENCE_ENDS = (".", "。", "!", "！", "?", "？")
SHORTEST = 0.02
"""Seconds; no word ends where it begins."""
USUAL = 0.7
"""Seconds of a word at most that is taken for a usual one: twice as long is too long where a sentence ends."""


def split_words(tokens: Sequence[int], tokenizer: Tokenizer, language: str) -> list[tuple[str, int]]:
    """Each word with its punctuation, and how many tokens it takes. Joined they are the text."""
    words: list[tuple[str, int]] = []
    for text, count in split_characters(tokens, tokenizer):
        bare = text.strip()
        opens = bool(words) and bool(words[-1][0].strip()) and set(words[-1][0].strip()) <= OPENING
        begins = text[:1].isspace() or language in UNSPACED
        closing = bool(bare) and not any(character.isalnum() for character in bare) and not set(bare) <= OPENING
        if words and (closing or not begins or (opens and not text[:1].isspace())):
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
        else:
            words.append((text, count))
    return words


def split_characters(tokens: Sequence[int], tokenizer: Tokenizer) -> list[tuple[str, int]]:
    """The shortest runs of tokens that hold whole characters, as text."""
    found: list[tuple[str, int]] = []
    data, count = b"", 0
    for token in tokens:
        data += tokenizer.token_bytes(token)
        count += 1
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        found.append((text, count))
        data, count = b"", 0
    if count:
        found.append((data.decode(errors="replace"), count))
    return found


def time_words(
    words: Sequence[tuple[str, int]], bounds: Sequence[float], seconds: float, ends: Sequence[float] = ()
) -> list[HeardWord]:
    """Times in seconds, rising, inside a window of `seconds`; each word begins before it ends.

    `bounds` and `ends` are a `WindowText`'s: where tokens begin, and where they end if that is known; if it is not,
    where the next one begins.
    """
    timed: list[tuple[str, float, float]] = []
    place = 0
    for text, count in words:
        timed.append((text, bounds[place], ends[place + count - 1] if ends else bounds[place + count]))
        place += count
    timed = timed if ends else shorten(timed)
    least = min(SHORTEST, seconds / max(1, len(timed)))
    found: list[HeardWord] = []
    floor = 0.0
    for number, (text, start, end) in enumerate(timed):
        left = len(timed) - number
        start = min(max(start, floor), seconds - least * left)
        end = min(max(end, start + least), seconds - least * (left - 1))
        found.append(HeardWord(text.strip(), start, end))
        floor = end
    return found


def shorten(timed: list[tuple[str, float, float]]) -> list[tuple[str, float, float]]:
    """Pauses between sentences are taken for parts of the words beside them: those that are too long are cut."""
    lengths = [end - start for _, start, end in timed if end > start]
    if not lengths:
        return timed
    longest = 2 * min(USUAL, statistics.median(lengths))
    cut: list[tuple[str, float, float]] = []
    for text, start, end in timed:
        if end - start > longest:
            if text.strip().endswith(SENTENCE_ENDS):
                end = start + longest
            elif not cut or cut[-1][0].strip().endswith(SENTENCE_ENDS):
                start = end - longest
        cut.append((text, start, end))
    return cut
