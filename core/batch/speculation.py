"""Speculation: several tokens of a row in one launch, guessed first and then drawn as they would have been anyway.

A draw depends on (logits, seed, position) alone. So a guess counts when it is the very token that is drawn in its
place, and what a row says is the same with guesses and without, at any temperature.
"""

from __future__ import annotations

from collections.abc import Iterator

from polymux.core.batch.plan import Grant

MATCHED = 3
"""Tokens that must have occurred before for what followed them to be a guess."""


class PromptLookup:
    """Guesses that what followed the newest tokens when they last occurred follows again (Saxena 2023).

    The guess is twice as long after one that was right, half as long after one that was wrong.
    """

    def __init__(self, longest: int) -> None:
        self._longest = longest
        self._length = longest
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = MATCHED
        self._guess: list[int] = []
        self._guessed_at = 0
        self.drafted = 0
        self.accepted = 0

    def guess(self, tokens: list[int]) -> list[int]:
        """What may follow the tokens, perhaps nothing; the same until there are more of them."""
        if self._guessed_at == len(tokens):
            return self._guess
        for end in range(self._indexed, len(tokens)):
            self._after[tuple(tokens[end - MATCHED : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        self._guessed_at = len(tokens)
        start = self._after.get(tuple(tokens[-MATCHED:]))
        self._guess = [] if start is None else tokens[start : start + self._length]
        return self._guess

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of a guess's tokens were launched, and so many right."""
        self.drafted += drafted
        self.accepted += accepted
        if accepted == drafted:
            self._length = min(2 * self._length, self._longest)
        else:
            self._length = max(self._length // 2, 1)


def list_guessed(finals: list[Grant]) -> Iterator[Grant]:
    """The draws before a grant's last that decide whether its guesses are right, as grants that end there."""
    for grant in finals:
        for count in range(grant.count - len(grant.guesses), grant.count):
            yield Grant(grant.row, grant.start, count)
