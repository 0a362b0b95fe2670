"""Scores of a prompt: how likely the model finds each of its tokens after those before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenBatch
from polymux.core.batch.plan import Plan
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.compute.device import Device

ROWS = 64
"""Places whose logits are turned into logprobs at once: a whole vocabulary in float32 for each."""


def list_scored(plan: Plan) -> Iterator[tuple[TokenRow, int, int]]:
    """Per row that wants scores: the first position in this launch whose next token is in the prompt, and how many."""
    for grant in plan.grants:
        row = token_row(grant.row)
        count = min(grant.count, row.prompt_length - 1 - grant.start)
        if row.request.scores is not None and count > 0:
            yield row, grant.start, count


def sample_scored(batch: TokenBatch, plan: Plan, device: Device) -> Tensor | None:
    """Have the model give logits at the scored places as well, behind the others.

    Returns the tokens that come after them, (S,), or None when no row wants scores.
    """
    wanted = {row: (start, count) for row, start, count in list_scored(plan)}
    if not wanted:
        return None
    places: list[int] = []
    targets: list[int] = []
    for grant, first in zip(plan.grants, batch.context.batch.starts):
        row = token_row(grant.row)
        if row in wanted:
            start, count = wanted[row]
            places += range(first, first + count)
            targets += row.tokens[start + 1 : start + 1 + count]
    sent = device.upload({"places": places, "targets": targets})
    batch.sampled = torch.cat([batch.sampled, sent["places"]])
    return sent["targets"]


def score(logits: Tensor, targets: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Logprobs of the targets (S,) under logits (S, vocabulary), and of the best alternatives, (S, most wanted)."""
    most = min(max(row.request.scores or 0 for row, _, _ in list_scored(plan)), logits.shape[1])
    chosen, best, ids = [], [], []
    for some, ahead in zip(logits.split(ROWS), targets.split(ROWS)):
        logprobs = some.float().log_softmax(dim=-1)
        chosen.append(logprobs.gather(1, ahead[:, None])[:, 0])
        values, tokens = logprobs.topk(most, dim=-1)
        best.append(values)
        ids.append(tokens)
    return {"scores": torch.cat(chosen), "best_scores": torch.cat(best), "best_ids": torch.cat(ids)}


def take_scores(plan: Plan, results: dict[str, list]) -> None:
    """The rows learn their scores. A row that was preempted computes some again: they are known already."""
    first = 0
    for row, start, count in list_scored(plan):
        wanted = row.request.scores or 0
        for offset in range(max(len(row.scores) - start, 0), count):
            place = first + offset
            best = list(zip(results["best_ids"][place][:wanted], results["best_scores"][place][:wanted]))
            row.scores.append((results["scores"][place], best))
        first += count
