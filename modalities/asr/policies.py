"""Which words of a hypothesis about unfinished speech are certain: what was told once is never taken back.

A hypothesis continues the tokens that are told already, which the decoder is given; so only its own need judging.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from polymux.core.text.tokenizer import Tokenizer

MARGIN = 8
"""Frames of 20 ms at the end of the sound whose words may not be complete."""
REWIND = 50
"""Frames that attention may fall behind: reordering and noise, but not a second telling."""


@dataclass(frozen=True)
class Hypothesis:
    """`tokens` continue what was told; `attended[i]` is the frame that token i was heard at, where that is known."""

    tokens: Sequence[int]
    frames: int
    """Of sound, without what fills up the window."""
    attended: Sequence[int] = ()
    trimmed: bool = False
    """More was written behind these, and not believed."""


class Policy(ABC):
    """Judges the hypotheses of one utterance, in order."""

    aligned = False
    """Whether it wants to know what each token attended to."""

    def __init__(self, begins_word: Callable[[int], bool]) -> None:
        self._begins_word = begins_word

    @abstractmethod
    def judge(self, hypothesis: Hypothesis) -> int:
        """How many of the hypothesis' tokens are certain. They end with a whole word."""

    def trim(self, hypothesis: Hypothesis) -> int:
        """How many of the tokens can be believed at all, certain or not."""
        return len(hypothesis.tokens)

    def reset(self) -> None:
        """The sound was cut here: hypotheses begin anew."""

    def _round_down(self, tokens: Sequence[int], count: int) -> int:
        """So many tokens or fewer, to the end of a word: the next one must be known to begin another."""
        while count and not (count < len(tokens) and self._begins_word(tokens[count])):
            count -= 1
        return count


class LocalAgreement(Policy):
    """What two hypotheses in a row agree on (Liu et al. 2020; Machacek et al. 2023, section 2, n=2)."""

    def __init__(self, begins_word: Callable[[int], bool]) -> None:
        super().__init__(begins_word)
        self._last: Sequence[int] = ()

    def judge(self, hypothesis: Hypothesis) -> int:
        tokens = hypothesis.tokens
        pairs = enumerate(zip(tokens, self._last))
        agreed = next((place for place, (new, old) in pairs if new != old), min(len(tokens), len(self._last)))
        certain = self._round_down(tokens, agreed)
        self._last = tokens[certain:]
        return certain

    def reset(self) -> None:
        self._last = ()


class AlignAtt(Policy):
    """Tokens up to the first that listens to the newest sound: what follows could still change that one (Papi et al.
    2023). A word that listens to what was long said before is the model repeating itself, and so is all after it: one
    that was heard there already, or that two others lie ahead of."""

    aligned = True

    def __init__(self, begins_word: Callable[[int], bool], margin: int = MARGIN) -> None:
        """`margin`: frames of 20 ms at the end that are too new."""
        super().__init__(begins_word)
        self._margin = margin

    def judge(self, hypothesis: Hypothesis) -> int:
        latest = hypothesis.frames - self._margin
        places = enumerate(hypothesis.attended)
        certain = next((place for place, frame in places if frame >= latest), len(hypothesis.attended))
        return self._round_down(hypothesis.tokens, certain)

    def trim(self, hypothesis: Hypothesis) -> int:
        furthest = reached = 0  # one token may listen astray: as far as two have is reached
        heard: dict[int, int] = {}
        for place, (token, frame) in enumerate(zip(hypothesis.tokens, hypothesis.attended)):
            if not self._begins_word(token):  # punctuation listens anywhere
                continue
            again = frame < furthest - REWIND and abs(heard.get(token, frame + REWIND + 1) - frame) <= REWIND
            if again or frame < reached - REWIND:
                return place
            furthest, reached = max(furthest, frame), max(reached, min(furthest, frame))
            heard[token] = frame
        return len(hypothesis.tokens)


def cut_loop(tokens: Sequence[int], before: Sequence[int] = ()) -> Sequence[int]:
    """The tokens up to where a model that says the same again and again, to their end, begins its second round: it may
    have begun its first one `before` them. All of them where it does not."""
    said = [*before, *tokens]
    end = len(said)
    for period in range(1, len(said) // 2 + 1):
        start = len(said) - period
        while start and said[start - 1] == said[start - 1 + period]:
            start -= 1
        if len(said) - start >= 2 * period:
            end = min(end, start + period)
    return tokens[: max(end - len(before), 0)]


def choose_policy(tokenizer: Tokenizer, *, aligned: bool) -> Callable[[], Policy]:
    """What opens the policy for one utterance after the other. `aligned`: the model's heads follow the sound well."""

    def begins_word(token: int) -> bool:
        return tokenizer.token_bytes(token)[:1] == b" "

    return lambda: AlignAtt(begins_word) if aligned else LocalAgreement(begins_word)
