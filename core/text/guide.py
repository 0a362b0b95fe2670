"""Guides: which tokens an answer may go on with, decided on the host from the tokens so far.

A guide belongs to one answer. The token stage asks for its mask when the newest token is known, between a launch's
forward pass and its draw, and tells it every token in order.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from functools import cached_property

import llguidance
import numpy as np
from numpy.typing import NDArray

from polymux.core.errors import InvalidRequest

Masks = NDArray[np.int32]
"""(answers, words): bit `t % 32` of word `t // 32` says whether token t is allowed."""


class Guide(ABC):
    """One answer's rule over tokens."""

    @property
    @abstractmethod
    def finished(self) -> bool:
        """Nothing more can follow: the answer is complete."""

    @property
    @abstractmethod
    def matcher(self) -> llguidance.LLMatcher | None:
        """Whose mask applies now; None: everything is allowed."""

    @abstractmethod
    def take(self, token: int) -> None:
        """The answer goes on with this token."""

    def adjust(self, mask: Masks) -> None:
        """Change what the matcher allows: one row of masks, all ones where there is no matcher."""


class GrammarGuide(Guide):
    """The answer is a sentence of a grammar."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher

    @property
    def finished(self) -> bool:
        return self._matcher.is_stopped()

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        return self._matcher

    def take(self, token: int) -> None:
        if not self._matcher.is_stopped():
            self._matcher.consume_token(token)
            check_matcher(self._matcher)


class ThoughtGuide(Guide):
    """A thought between two marks, of at most `budget` tokens, then an answer with a guide of its own.

    `inside`: the prompt has already opened the thought; otherwise the first token may do so. `stops` may not cut a
    thought short when an answer is due.
    """

    def __init__(
        self,
        begin: int,
        end: int,
        answer: Guide | None = None,
        *,
        inside: bool,
        budget: int | None = None,
        stops: Collection[int] = (),
    ) -> None:
        self._begin = begin
        self._end = end
        self._stops = stops
        self._answer = answer
        self._budget = budget
        self._inside = inside
        self._opening = not inside
        self._thought = 0

    @property
    def finished(self) -> bool:
        return not self._inside and self._answer is not None and self._answer.finished

    @property
    def matcher(self) -> llguidance.LLMatcher | None:
        return None if self._inside or self._answer is None else self._answer.matcher

    def take(self, token: int) -> None:
        if self._opening and token == self._begin:
            self._inside = True
        elif self._inside and token == self._end:
            self._inside = False
        elif self._inside:
            self._thought += 1
        elif self._answer is not None:
            self._answer.take(token)
        self._opening = False

    def adjust(self, mask: Masks) -> None:
        if self._opening and self._budget != 0:
            _allow(mask, self._begin)
        elif self._inside and self._budget is not None and self._thought >= self._budget:
            mask[:] = 0
            _allow(mask, self._end)
        elif self._inside and self._answer is not None:
            for token in self._stops:
                mask[token // 32] &= ~_bit(token)


class MaskWriter:
    """Writes the masks of many answers at once, on as many cores as help. `vocabulary`: the width of the logits."""

    def __init__(self, vocabulary: int) -> None:
        self._words = -(-vocabulary // 32)

    @cached_property
    def _executor(self) -> llguidance.LLExecutor:
        return llguidance.LLExecutor()

    def write(self, guides: Sequence[Guide]) -> Masks:
        """Raises `InvalidRequest` when a grammar turns out to be too ambiguous to follow."""
        masks = np.full((len(guides), self._words), -1, dtype=np.int32)
        matchers = [(matcher, i) for i, guide in enumerate(guides) if (matcher := guide.matcher) is not None]
        if matchers:
            self._executor.unsafe_compute_mask_ptr(matchers, masks.ctypes.data, self._words * 4, len(guides))
        for matcher, _ in matchers:
            check_matcher(matcher)
        for guide, mask in zip(guides, masks):
            guide.adjust(mask)
        return masks


def check_matcher(matcher: llguidance.LLMatcher) -> None:
    """Raises `InvalidRequest` when the matcher has given up."""
    if matcher.is_error():
        raise InvalidRequest(f"This format cannot be followed: {matcher.get_error()}", param="response_format")


def _allow(mask: Masks, token: int) -> None:
    mask[token // 32] |= _bit(token)


def _bit(token: int) -> np.int32:
    return np.uint32(1 << (token % 32)).astype(np.int32)
