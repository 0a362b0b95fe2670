"""Rules in launches: what they remember of each row, and the draws they are applied to.

A row that guesses draws several times in one launch. Each draw is then ruled as if the guesses before it were right,
and what is remembered of the row are the draws up to the first that no guess foresaw.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from polymux.core.compute.device import send
from polymux.core.compute.rules import Choose, LogitRule


@dataclass
class RuleUse:
    """One rule in one launch: the rows of the sampled batch that carry it, and where their states are."""

    rule: LogitRule
    rows: Tensor
    """(n,) int64: places in the sampled batch."""
    slots: Tensor
    """(n,) int64: the same rows' slots."""
    states: Tensor
    """(slots, width) int64: of all slots, written in place."""

    def apply(self, logits: Tensor) -> Tensor:
        """The rule's rows of the logits replaced; others untouched."""
        ruled = self.rule.apply(logits[self.rows], self.states[self.slots])
        return logits.index_copy(0, self.rows, ruled)

    def advance(self, tokens: Tensor) -> None:
        if self.rule.width:
            self.states[self.slots] = self.rule.advance(self.states[self.slots], tokens[self.rows])


@dataclass
class Ladder:
    """The draws of n rows, each row's one behind another: draw j comes after the row's first j guesses.

    A rung is (row, j), counted row by row; rows have as many rungs as the longest one.
    """

    slots: Tensor
    """(n,) int64: of the rows."""
    guesses: Tensor
    """(n, longest) int64; what is behind a row's own is padding."""
    counts: Tensor
    """(n, 1) int64: guesses of each row."""
    places: Tensor
    """(m,) int64: places of the draws in the sampled batch."""
    rungs: Tensor
    """(m,) int64: the same draws' rungs."""

    @classmethod
    def build(
        cls, places: Sequence[int], slots: Sequence[int], before: Sequence[Sequence[int]], device: torch.device
    ) -> Ladder:
        """Of draws at these places of the sampled batch: each one's slot, and the guesses before it."""
        guesses: dict[int, Sequence[int]] = {}
        for slot, told in zip(slots, before, strict=True):
            if len(told) >= len(guesses.get(slot, ())):
                guesses[slot] = told
        order = {slot: row for row, slot in enumerate(guesses)}
        longest = max(map(len, guesses.values()))

        def place(numbers: list[int]) -> Tensor:
            return send(np.array(numbers, np.int64), device)

        padded = [id for told in guesses.values() for id in (*told, *[0] * (longest - len(told)))]
        return cls(
            slots=place(list(guesses)),
            guesses=place(padded).view(len(guesses), longest),
            counts=place([len(told) for told in guesses.values()])[:, None],
            places=place(list(places)),
            rungs=place([order[slot] * (longest + 1) + len(told) for slot, told in zip(slots, before, strict=True)]),
        )


@dataclass
class ForetoldUse:
    """One rule in a launch in which rows that carry it guessed, used like a `RuleUse`."""

    rule: LogitRule
    ladder: Ladder
    states: Tensor
    """(slots, width) int64: of all slots, written in place."""

    def apply(self, logits: Tensor) -> Tensor:
        """The rule's draws of the logits replaced; others untouched."""
        places, rungs = self.ladder.places, self.ladder.rungs
        ruled = self.rule.apply(logits[places], self._climb().flatten(0, 1)[rungs])
        return logits.index_copy(0, places, ruled)

    def advance(self, tokens: Tensor) -> None:
        """Each row's state becomes the one after its first draw that no guess foresaw: later draws do not count."""
        if not self.rule.width:
            return
        ladder = self.ladder
        rows, longest = ladder.guesses.shape
        drawn = tokens.new_zeros(rows * (longest + 1)).index_copy(0, ladder.rungs, tokens[ladder.places])
        drawn = drawn.view(rows, longest + 1)
        guessed = torch.arange(longest, device=tokens.device) < ladder.counts
        right = ((drawn[:, :longest] == ladder.guesses) & guessed).cumprod(dim=1).sum(dim=1)
        order = torch.arange(rows, device=tokens.device)
        self.states[ladder.slots] = self.rule.advance(self._climb()[order, right], drawn[order, right])

    def _climb(self) -> Tensor:
        """(rows, 1 + longest, width): the states before each rung's draw."""
        states = [self.states[self.ladder.slots]]
        for guess in self.ladder.guesses.unbind(dim=1):
            states.append(self.rule.advance(states[-1], guess))
        return torch.stack(states, dim=1)


class RuleStates:
    """The states of a stage's rows, by rule and slot."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._slots = slots
        self._device = device
        self._states: dict[LogitRule, Tensor] = {}
        self._fused: dict[tuple[LogitRule, ...], Choose | None] = {}

    def admit(self, slot: int, rules: Sequence[LogitRule], generated: Sequence[int]) -> None:
        for rule in rules:
            states = self._states.get(rule)
            if states is None:
                shape = (self._slots, rule.width)
                states = self._states[rule] = torch.zeros(shape, dtype=torch.int64, device=self._device)
            states[slot] = rule.replay(generated, self._device)[0]

    def fuse(self, rules: tuple[LogitRule, ...], vocabulary: int) -> Choose | None:
        """What chooses under all of them at once; found once."""
        if rules not in self._fused:
            self._fused[rules] = rules[-1].fuse(rules[:-1], vocabulary, self._device)
        return self._fused[rules]

    def find(self, rules: Sequence[LogitRule]) -> list[Tensor]:
        """The states of rules that were admitted before, by slot."""
        return [self._states[rule] for rule in rules]

    def apply(self, logits: Tensor, slots: Tensor, rules: Sequence[LogitRule]) -> Tensor:
        """Logits of rows that all carry these rules, admitted before; (R,) slots."""
        for rule in rules:
            logits = rule.apply(logits, self._states[rule][slots])
        return logits

    def advance(self, tokens: Tensor, slots: Tensor, rules: Sequence[LogitRule]) -> None:
        """The tokens (R,) were drawn."""
        for rule in rules:
            if rule.width:
                states = self._states[rule]
                states[slots] = rule.advance(states[slots], tokens)

    def remember(self, slots: Tensor, rules: Sequence[LogitRule]) -> list[Tensor]:
        """What the rules know of these rows now, (R, width) each."""
        return [self._states[rule][slots] for rule in rules]

    def recall(
        self, slots: Tensor, rules: Sequence[LogitRule], known: Sequence[Sequence[Tensor]], which: Tensor
    ) -> None:
        """Of each row the rules know again what they knew at one of several times; `which`, (R,), of `known`."""
        order = torch.arange(len(slots), device=slots.device)
        for rule, states in zip(rules, zip(*known)):
            if rule.width:
                self._states[rule][slots] = torch.stack(list(states))[which, order]

    @contextmanager
    def forget(self) -> Iterator[None]:
        """What is drawn inside was never drawn, as far as rules remember."""
        kept = {rule: states.clone() for rule, states in self._states.items() if rule.width}
        try:
            yield
        finally:
            for rule, states in kept.items():
                self._states[rule].copy_(states)

    def gather(
        self, rules: Sequence[Sequence[LogitRule]], slots: Sequence[int], before: Sequence[Sequence[int]] = ()
    ) -> list[RuleUse | ForetoldUse]:
        """Every rule that a draw of the launch is ruled by; a row's own order holds whatever its neighbours carry.

        By draw: its row's `rules` and slot, and the guesses `before` it in the same launch (empty: nobody guessed).
        """
        places: dict[tuple[int, LogitRule], list[int]] = {}
        for place, carried in enumerate(rules):
            for turn, rule in enumerate(carried):
                places.setdefault((turn, rule), []).append(place)
        ladders: dict[tuple[int, ...], Ladder] = {}
        uses: list[RuleUse | ForetoldUse] = []
        for (_, rule), draws in sorted(places.items(), key=lambda entry: entry[0][0]):
            of = [slots[place] for place in draws]
            states = self._states[rule]
            if any(before[place] for place in draws if before):
                key = tuple(draws)
                if key not in ladders:
                    ladders[key] = Ladder.build(draws, of, [before[place] for place in draws], self._device)
                uses.append(ForetoldUse(rule, ladders[key], states))
            else:
                rows, owners = send(np.array([draws, of], np.int64), self._device)
                uses.append(RuleUse(rule, rows, owners, states))
        return uses
