"""Stop strings: cut exactly before the first one that completes, and hold back only what may become one.

A stop string may be spread over any number of tokens. Each is followed by a Knuth-Morris-Pratt automaton (Knuth,
Morris, Pratt 1977), so the work per character does not depend on the length of the stop strings.
"""

from __future__ import annotations

from collections.abc import Sequence


def border_table(pattern: str) -> list[int]:
    """For every prefix of `pattern`, the length of its longest proper prefix that is also its suffix."""
    borders = [0]
    for character in pattern[1:]:
        length = borders[-1]
        while length and pattern[length] != character:
            length = borders[length - 1]
        borders.append(length + (pattern[length] == character))
    return borders


class StopStrings:
    """Watches one text as it grows. `matched` is the stop string that ended it.

    What is pushed and flushed, joined, is the text up to the match, whatever the pieces it came in.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self.matched: str | None = None
        # Longest first: of two that complete at the same character, the longer one began earlier.
        self._patterns = [(stop, border_table(stop)) for stop in sorted(set(stops), key=len, reverse=True)]
        self._lengths = [0] * len(self._patterns)
        self._held = ""

    def push(self, text: str) -> str:
        """What may be shown of the text so far and was not yet. After a match nothing more is."""
        if self.matched is not None:
            return ""
        whole = self._held + text
        for position, character in enumerate(text, start=len(self._held) + 1):
            for index, (stop, borders) in enumerate(self._patterns):
                length = self._lengths[index]
                while length and stop[length] != character:
                    length = borders[length - 1]
                length += stop[length] == character
                if length == len(stop):
                    self.matched, self._held = stop, ""
                    return whole[: position - length]
                self._lengths[index] = length
        shown = len(whole) - max(self._lengths, default=0)
        self._held = whole[shown:]
        return whole[:shown]

    def flush(self) -> str:
        """The text ended, or something else begins: what was held back was a false start."""
        held, self._held = self._held, ""
        self._lengths = [0] * len(self._patterns)
        return held

    @property
    def held(self) -> int:
        """Characters that are held back."""
        return len(self._held)
