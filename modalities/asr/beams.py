"""Beam search over one window's text, as transformers has it (`generate` with `num_beams` and renormalised logits).

Each step is one row per beam that is given the beam's tokens and asked for the likeliest that follow. A beam that
several continuations share is computed once: its full blocks are found in the prefix index, only what stands behind
them is computed anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from polymux.core.batch.sequence import TokenRequest, TokenRow
from polymux.core.engine.job import Job


@dataclass(frozen=True)
class Beam:
    """What was generated, an end included, and the sum of its logprobs."""

    tokens: tuple[int, ...]
    score: float

    @property
    def confidence(self) -> float:
        """The mean logprob of its tokens."""
        return self.score / len(self.tokens)


def extend(job: Job, request: TokenRequest, beam: Beam, width: int) -> TokenRow:
    """A row that tells the likeliest `2 * width` tokens behind `beam`; its rules know the beam as generated."""
    asked = replace(request, max_tokens=len(beam.tokens) + 1, logprobs=2 * width, lasting=False, watched=())
    row = TokenRow(job, asked)
    row.tokens += beam.tokens
    return row


async def search_beams(job: Job, request: TokenRequest, width: int, start: Callable[[TokenRow], TokenRow]) -> Beam:
    """The best of `width` texts by the mean logprob of their tokens, the end counted. `start` hands over a row.

    It ends when `width` texts are complete and the likeliest beam's mean is below all of theirs.
    """
    running = [Beam((), 0.0)]
    complete: list[Beam] = []
    for length in range(1, request.max_tokens + 1):
        rows = [start(extend(job, request, beam, width)) for beam in running]
        found: list[Beam] = []
        for beam, row in zip(running, rows):
            await row
            found += [
                Beam((*beam.tokens, token), beam.score + logprob)
                for token, logprob in row.tops[0]
                if logprob != -float("inf")
            ]
        found = sorted(found, key=lambda beam: -beam.score)[: 2 * width]
        final = length == request.max_tokens
        complete += [beam for beam in found[:width] if final or ends(beam, request.stop_ids)]
        complete = sorted(complete, key=lambda beam: -beam.confidence)[:width]
        running = [beam for beam in found if not ends(beam, request.stop_ids)][:width]
        if not running or (len(complete) == width and running[0].confidence <= complete[-1].confidence):
            break
    return complete[0]


def ends(beam: Beam, stop_ids: Sequence[int] | frozenset[int]) -> bool:
    return beam.tokens[-1] in stop_ids
