"""A token row: a prompt, what was generated after it, and how the next token is drawn."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from polymux.core.batch.row import Row, Signal
from polymux.core.cache.prefix import LatestChain, chain_digests
from polymux.core.errors import InternalError
from polymux.core.tasks import Sampling

if TYPE_CHECKING:
    from polymux.core.batch.speculation import Foresight
    from polymux.core.cache.holding import Holding
    from polymux.core.compute.rules import LogitRule
    from polymux.core.engine.job import Job
    from polymux.core.text.guide import Guide


@dataclass(frozen=True)
class Inlay:
    """`count` places of a prompt, from `start` on, that hold what an encoder made of a picture."""

    start: int
    count: int
    block: int
    """Where the picture's blocks begin in the holding that the row reads."""
    digest: bytes
    """Names the content, which the token ids in these places do not."""
    offset: int = 0
    """Vectors of the picture that stand before these: one may be cut into several stretches (a clip's frames)."""


@dataclass(frozen=True)
class TokenRequest:
    """What to generate. `seed` fixes the draw: token at position p is a function of (logits, seed, p)."""

    prompt: list[int]
    """Token ids."""
    max_tokens: int
    """To make, at most."""
    sampling: Sampling = Sampling()
    """How they are drawn."""
    seed: int = 0
    """Of the draws."""
    stop_ids: frozenset[int] = frozenset()
    """What ends the row."""
    logprobs: int | None = None
    """None: off. k >= 0: the chosen token's logprob and the k best alternatives."""
    rules: tuple[LogitRule, ...] = ()
    """Applied in this order before anything else; rows that carry the same objects are computed together."""
    lasting: bool = False
    """The rules are the same objects in all rows of the program: steps may be recorded with them."""
    watched: tuple[int, ...] = ()
    """Tokens whose logprobs at the first place are wanted, before any rule."""
    scores: int | None = None
    """None: off. k >= 0: the logprob of every prompt token but the first, and the k best alternatives. Only tokens
    that are computed are scored: the salt must keep the row from what others computed."""
    salt: bytes = b""
    """Root of the prefix digests: model, adapter, tenant."""
    inlays: tuple[Inlay, ...] = ()
    """In order, none over another."""
    positions: np.ndarray | None = None
    """(axes, prompt) int64: where each prompt token stands, for models with positions of several axes. What follows
    the prompt goes on behind the largest of them. None: one after the other."""
    guide: Guide | None = None
    """Says on the host which tokens may come next. Belongs to one row, unlike the rest of a request."""
    publish: bool = True
    """Report tokens to the caller as they come; otherwise only the program sees them."""

    @cached_property
    def shift(self) -> int:
        """What is added to a later token's place in the row to have its position."""
        return 0 if self.positions is None else int(self.positions.max()) + 1 - len(self.prompt)

    @cached_property
    def plain(self) -> bool:
        """Nothing is wanted but a token at some temperature."""
        bare = Sampling(temperature=self.sampling.temperature, seed=self.sampling.seed)
        rules = self.rules or self.watched or self.guide is not None
        return self.sampling == bare and self.logprobs is None and not rules

    @cached_property
    def recordable(self) -> bool:
        """After the first token nothing is wanted but the likeliest under lasting rules, and its logprob."""
        return (
            self.lasting
            and self.sampling == Sampling(temperature=0.0, seed=self.sampling.seed)
            and not self.logprobs
            and self.guide is None
        )

    @cached_property
    def speculative(self) -> bool:
        """Draws can be made behind guesses: no token is counted on the device, or allowed by the host."""
        sampling = self.sampling
        counted = sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0
        return not (counted or self.guide is not None)


class TokenRow(Row):
    """`tokens` is what the host knows: the prompt and the collected samples. `pending` samples are still in flight,
    so the device already holds `len(tokens) + pending` of them; KV is scheduled for the first `scheduled`."""

    def __init__(self, job: Job, request: TokenRequest, branch: int = 0) -> None:
        super().__init__(job, branch)
        self.request = request
        self.tokens = list(request.prompt)
        self.further: list[list[int]] = []
        """With a depth model: what completes each generated token to its unit."""
        self.prompt_length = len(request.prompt)
        self.pending = 0
        self.reason: str | None = None
        self.started = Signal()
        """Set once the first token is known: the prompt's KV is computed, and other branches can share it.
        Also set, or failed, when the row ends before that."""
        self.logprobs: list[float] = []
        self.tops: list[list[tuple[int, float]]] = []
        """Of each new token the best alternatives, where they are wanted and not published."""
        self.watched: list[float] = []
        """Logprobs of the request's watched tokens, once the first token is known."""
        self.scores: list[tuple[float, list[tuple[int, float]]]] = []
        """Per prompt token but the first, as far as they are computed."""
        self.foresight: Foresight | None = None
        """Guesses tokens ahead; such a row waits for each launch's results."""
        self.adapter: Holding | None = None
        """One block: the weights that are added to the model's for this row. Also one of `reads`."""
        self.cached = 0
        """Prompt tokens that the prefix index answered."""
        self.published = 0
        self.matched = 0
        """Blocks that it found computed when it was admitted."""
        self.resumed = 0
        """Tokens the row had when it got its slot; later ones were sampled into the slot."""
        self.tabled = 0
        """Blocks that the device's table already has."""
        self.digests: list[bytes] = []
        self._awaited = 0
        self._reached = Signal()

    def end(self, error: BaseException | None = None) -> None:
        super().end(error)
        if error is None:
            self.started.set()
        else:
            self.started.fail(error)
        self.note_progress()

    def reach(self, count: int) -> Signal:
        """Set once `count` tokens are generated or no more will be; failed when the row fails before that. For one
        caller at a time."""
        self._awaited, self._reached = count, Signal()
        self.note_progress()
        return self._reached

    def note_progress(self) -> None:
        """The row has a new token, or will get no more."""
        if self._reached.done:
            return
        if self.ended.error is not None:
            self._reached.fail(self.ended.error)
        elif self.ended.done or len(self.tokens) - self.prompt_length >= self._awaited:
            self._reached.set()

    @property
    def length(self) -> int:
        """Tokens that exist on the device."""
        return len(self.tokens) + self.pending

    @property
    def generated(self) -> list[int]:
        return self.tokens[self.prompt_length :]

    @property
    def exhausted(self) -> bool:
        """Every token that may be sampled is sampled, or on its way."""
        return len(self.tokens) + self.pending - self.prompt_length >= self.request.max_tokens

    def chain(self, size: int, latest: LatestChain) -> list[bytes]:
        """Content digests of the full blocks of the tokens that the host knows; computed once, also across
        preemptions. Not to be changed. `latest`: of the stage."""
        known = len(self.digests)
        if (known + 1) * size > len(self.tokens):
            return self.digests
        if not known and not self.request.inlays:
            self.digests = latest.make(self.request.salt, self.tokens, size)
        else:
            parent = self.digests[-1] if known else self.request.salt
            extra = (lambda number: self._content((known + number) * size, size)) if self.request.inlays else None
            self.digests += chain_digests(parent, self.tokens[known * size :], size, extra)
        return self.digests

    def _content(self, start: int, size: int) -> bytes:
        """What the digest of a block must name beside its tokens: which picture's vectors lie where in it, at which
        positions, and what completes its tokens to units."""
        parts = [
            (inlay.start - inlay.offset - start).to_bytes(8, "little", signed=True) + inlay.digest
            for inlay in self.request.inlays
            if inlay.start < start + size and inlay.start + inlay.count > start
        ]
        if parts and self.request.positions is not None:
            parts.append(self.request.positions[:, start : start + size].tobytes())
        for unit in self.further[max(start - self.prompt_length, 0) : max(start + size - self.prompt_length, 0)]:
            parts += (id.to_bytes(4, "little") for id in unit)
        return b"".join(parts)

    @property
    def cumulative_logprob(self) -> float:
        return math.fsum(self.logprobs)


def token_row(row: Row) -> TokenRow:
    if not isinstance(row, TokenRow):
        raise InternalError(f"a token stage was given a {type(row).__name__}")
    return row


def can_replay(rows: Sequence[TokenRow]) -> bool:
    """Whether a recorded step draws what the rows want: a token and no more, or the likeliest under common rules."""
    rules = rows[0].request.rules
    if rules:
        return all(row.request.recordable and row.request.rules == rules for row in rows)
    return all(row.request.plain for row in rows)
