"""Speculation: several tokens of a row in one launch, guessed first and then drawn as they would have been anyway.

A draw depends on (logits, seed, position) alone. So a guess counts when it is the very token that is drawn in its
place, and what a row says is the same with guesses and without, at any temperature. Whoever guesses is a `Drafter`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from polymux.core.batch.plan import Grant

if TYPE_CHECKING:
    from polymux.core.batch.decoder import TokenBatch, TokenModel
    from polymux.core.batch.drawing import Drawer
    from polymux.core.batch.packing import Packer
    from polymux.core.batch.rounds import GuessRounds
    from polymux.core.batch.sequence import TokenRow
    from polymux.core.cache.blocks import CacheSpec

MATCHED = 3
"""Tokens that must have occurred before for what followed them to be a guess."""


class Foresight:
    """How far one row looks ahead: twice as far after a guess that was right, half as far after one that was wrong."""

    def __init__(self, longest: int, *, fixed: bool = False) -> None:
        """`fixed`: always as far; where a launch costs the same whatever is guessed."""
        self._longest = longest
        self._fixed = fixed
        self.length = longest

    def reach(self, tokens: list[int]) -> int:
        """How many tokens would be guessed now, after `tokens`."""
        return self.length

    def learn(self, drafted: int, accepted: int) -> None:
        """So many of a guess's tokens were launched, and so many right."""
        if self._fixed:
            return
        if accepted == drafted:
            self.length = min(2 * self.length, self._longest)
        else:
            self.length = max(self.length // 2, 1)


class Drafter(ABC):
    """Guesses what the rows of one stage say next. Wrong guesses cost time, never truth.

    A stage calls `bind` once; `open` when a row is admitted; `draft` before a launch in which rows guess; `follow`
    after every launch of the model, prompts included.
    """

    cache: CacheSpec | None = None
    """What it keeps on the device for every block of tokens, beside the model's keys and values: `units` tokens each.
    It is found again, shared and evicted together with them."""
    wants_hidden = False
    """`follow` is given the model's last hidden states (EAGLE- and MTP-class drafters build on them)."""

    def bind(self, packer: Packer, drawer: Drawer) -> None:
        """The stage is there. `packer.lend(model, view)` packs the same rows for another model, whose part of the
        cache is `packer.extra`; `drawer` draws as the stage itself does."""

    def open_rounds(self, model: TokenModel, most: int) -> GuessRounds | None:
        """Guessing and checking in recorded launches, of up to `most` rows, where it can be. Called after `bind`."""
        return None

    @abstractmethod
    def open(self, row: TokenRow) -> Foresight:
        """The row has a slot, again perhaps: how far it shall look ahead. Kept while the row lives."""

    @abstractmethod
    def draft(self, rows: Sequence[TokenRow], counts: Sequence[int]) -> list[list[int]]:
        """For each row exactly `counts[i]` ids of the model's vocabulary that may follow `row.tokens`.

        Called again with the same rows when a launch is repeated; it must then say the same.
        """

    def follow(self, batch: TokenBatch) -> None:
        """The model has computed these tokens of these rows, guesses included; `batch.hidden` (T, dim) is there if it
        is wanted. What guesses will need is computed now, into `cache`.

        Recorded decode steps of rows that do not guess are not told: what is missing makes guesses worse, not wrong.
        """


class PromptLookup(Foresight):
    """Guesses that what followed the newest tokens when they last occurred follows again (Saxena 2023)."""

    def __init__(self, longest: int) -> None:
        super().__init__(longest)
        self._after: dict[tuple[int, ...], int] = {}
        self._indexed = MATCHED
        self._guess: list[int] = []
        self._guessed_at = 0

    def reach(self, tokens: list[int]) -> int:
        return len(self.guess(tokens))

    def guess(self, tokens: list[int]) -> list[int]:
        """What may follow the tokens, perhaps nothing; the same until there are more of them."""
        if self._guessed_at == len(tokens):
            return self._guess
        for end in range(self._indexed, len(tokens)):
            self._after[tuple(tokens[end - MATCHED : end])] = end
        self._indexed = max(self._indexed, len(tokens))
        self._guessed_at = len(tokens)
        start = self._after.get(tuple(tokens[-MATCHED:]))
        self._guess = [] if start is None else tokens[start : start + self.length]
        return self._guess


class LookupDrafter(Drafter):
    """Every row looks back at what it has itself; nothing is kept on the device."""

    def __init__(self, longest: int) -> None:
        self._longest = longest

    def open(self, row: TokenRow) -> PromptLookup:
        return PromptLookup(self._longest)

    def draft(self, rows: Sequence[TokenRow], counts: Sequence[int]) -> list[list[int]]:
        return [
            row.foresight.guess(row.tokens)[:count] if isinstance(row.foresight, PromptLookup) else [0] * count
            for row, count in zip(rows, counts, strict=True)
        ]


def list_guessed(finals: list[Grant]) -> Iterator[Grant]:
    """The draws before a grant's last that decide whether its guesses are right, as grants that end there."""
    for grant in finals:
        for right in range(len(grant.guesses)):
            count = grant.count - len(grant.guesses) + right
            yield Grant(grant.row, grant.start, count, guesses=grant.guesses[:right])
