"""Logit rules and sampling, vectorised over the rows of a launch, on the device and without waiting for it.

Order: rules, [logprobs are taken here], penalties, bias, temperature, top-k, top-p, min-p, draw.
The draw inverts the cumulative distribution at a uniform number that depends only on (seed, position): a row's token
never depends on its neighbours, and non-finite logits cannot trip a device assertion.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from polymux.core.compute.device import send
from polymux.core.compute.masks import MaskUse
from polymux.core.compute.ruling import ForetoldUse, RuleUse
from polymux.core.tasks import Sampling

_GAMMA = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def draw_uniform(seeds: Tensor, positions: Tensor) -> Tensor:
    """One float32 in [0, 1) per row from int64 seeds and positions (SplitMix64, Steele et al. 2014)."""
    state = seeds + (positions + 1) * _GAMMA
    state = (state ^ _shift(state, 30)) * _MIX_1
    state = (state ^ _shift(state, 27)) * _MIX_2
    state = state ^ _shift(state, 31)
    return _shift(state, 40).to(torch.float32) * 2.0**-24


def _shift(value: Tensor, bits: int) -> Tensor:
    """Logical right shift of signed 64-bit integers."""
    return (value >> bits) & ((1 << (64 - bits)) - 1)


@dataclass
class Penalties:
    """A row's token counts on the device, kept only for rows that ask for a penalty."""

    prompt: Tensor
    """(vocabulary,) bool: tokens of the prompt."""
    counts: Tensor
    """(vocabulary,) int32: how often each was generated."""

    @classmethod
    def of(cls, prompt: list[int], generated: list[int], vocabulary: int, device: torch.device) -> Penalties:
        seen = torch.zeros(vocabulary, dtype=torch.bool)
        seen[torch.tensor(prompt, dtype=torch.long)] = True
        counts = torch.bincount(torch.tensor(generated, dtype=torch.long), minlength=vocabulary).to(torch.int32)
        return cls(send(seen.numpy(), device), send(counts.numpy(), device))


def wants_penalties(sampling: Sampling) -> bool:
    return bool(sampling.presence_penalty or sampling.frequency_penalty or sampling.repetition_penalty != 1.0)


@dataclass
class SampleBatch:
    """How the R rows of a launch draw. `positions` are the places their tokens will have in their sequences."""

    samplings: list[Sampling]
    seeds: list[int]
    positions: list[int]
    penalties: list[Penalties | None]
    logprobs: int | None
    """The largest number of alternatives any row asks for; None when no row wants logprobs."""
    rules: Sequence[RuleUse | ForetoldUse | MaskUse] = ()
    watched: list[tuple[int, ...]] = field(default_factory=list)
    """Per row, tokens whose logprobs are wanted before any rule; empty when no row watches one."""


@dataclass
class Samples:
    """Per row: the token, whether its logits were finite; with logprobs also the chosen one's and the best k."""

    tokens: Tensor
    finite: Tensor
    logprobs: Tensor | None = None
    top_logprobs: Tensor | None = None
    top_tokens: Tensor | None = None
    watched: Tensor | None = None

    def tensors(self) -> dict[str, Tensor]:
        named = vars(self)
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def sample(logits: Tensor, batch: SampleBatch) -> Samples:
    """Draw one token per row from float32 logits (R, vocabulary)."""
    # NaN wins in both, so two reductions tell what a test of every element would, in a fraction of its time
    finite = torch.isfinite(logits.amax(dim=-1)) & torch.isfinite(logits.amin(dim=-1))
    watched = _watch(logits, batch.watched)
    for use in batch.rules:
        logits = use.apply(logits)
    raw = logits
    logits = _penalize(logits, batch)
    if all(sampling.temperature == 0.0 for sampling in batch.samplings):
        tokens = logits.argmax(dim=-1)
    else:
        tokens = _draw(logits, batch)
    for row, penalties in enumerate(batch.penalties):
        if penalties is not None:
            penalties.counts.index_add_(0, tokens[row : row + 1], torch.ones_like(penalties.counts[:1]))
    for use in batch.rules:
        use.advance(tokens)
    result = Samples(tokens, finite, watched=watched)
    if batch.logprobs is not None:
        logprobs = raw.log_softmax(dim=-1)
        result.logprobs = logprobs.gather(1, tokens[:, None])[:, 0]
        if batch.logprobs:
            result.top_logprobs, result.top_tokens = logprobs.topk(min(batch.logprobs, raw.shape[1]), dim=-1)
    return result


def _watch(logits: Tensor, watched: list[tuple[int, ...]]) -> Tensor | None:
    """Logprobs of each row's watched tokens, (R, most that a row watches); what is behind a row's own is padding."""
    most = max(map(len, watched), default=0)
    if not most:
        return None
    ids = send(np.array([[*each, *[0] * (most - len(each))] for each in watched], np.int64), logits.device)
    return logits.log_softmax(dim=-1).gather(1, ids)


def _penalize(logits: Tensor, batch: SampleBatch) -> Tensor:
    rows = [row for row, penalties in enumerate(batch.penalties) if penalties is not None]
    biased = [row for row, sampling in enumerate(batch.samplings) if sampling.logit_bias]
    if not rows and not biased:
        return logits
    logits = logits.clone()
    for row in rows:
        penalties, sampling = batch.penalties[row], batch.samplings[row]
        if penalties is None:
            continue
        values = logits[row]
        if sampling.repetition_penalty != 1.0:
            seen = penalties.prompt | (penalties.counts > 0)
            factor = sampling.repetition_penalty
            values = torch.where(seen, torch.where(values > 0, values / factor, values * factor), values)
        values = values - sampling.frequency_penalty * penalties.counts
        logits[row] = values - sampling.presence_penalty * (penalties.counts > 0)
    for row in biased:
        bias = batch.samplings[row].logit_bias
        ids = send(np.array(list(bias), np.int64), logits.device)
        logits[row, ids] += send(np.array(list(bias.values()), np.float32), logits.device)
    return logits


def _draw(logits: Tensor, batch: SampleBatch) -> Tensor:
    device = logits.device
    samplings = batch.samplings
    vocabulary = logits.shape[1]
    floats = [(sampling.temperature, sampling.top_p, sampling.min_p) for sampling in samplings]
    temperatures, top_p, min_p = send(np.array(floats, np.float32), device).unbind(dim=1)
    greedy = temperatures == 0.0
    # from the maximum down, so that no temperature is too small
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / torch.where(greedy, 1.0, temperatures)[:, None]
    kept = [sampling.top_k or vocabulary for sampling in samplings]
    seeds, positions, top_k = send(np.array([batch.seeds, batch.positions, kept], np.int64), device)
    uniform = draw_uniform(seeds, positions)[:, None]
    probabilities = scaled.softmax(dim=-1)
    if any(0 < sampling.top_k < vocabulary or sampling.top_p < 1.0 or sampling.min_p > 0.0 for sampling in samplings):
        ordered, order = probabilities.sort(dim=-1, descending=True, stable=True)
        top_k, top_p, min_p = top_k[:, None], top_p[:, None], min_p[:, None]
        ranks = torch.arange(vocabulary, device=device)[None]
        before = ordered.cumsum(dim=-1) - ordered
        keep = (ranks < top_k) & ((before < top_p) | (top_p >= 1.0) | (ranks == 0))
        keep &= ordered >= min_p * ordered[:, :1]
        # back in the vocabulary's order: a row without truncation draws the same whether a neighbour has one or not
        probabilities = torch.zeros_like(ordered).scatter_(1, order, ordered.where(keep, 0.0))
    cumulative = probabilities.cumsum(dim=-1)
    drawn = torch.searchsorted(cumulative, uniform * cumulative[:, -1:], right=True).clamp_(max=vocabulary - 1)
    # rounding can land on a token of no probability behind the last one that has some
    last = (probabilities > 0).to(torch.int8).cumsum(dim=-1, dtype=torch.int32).argmax(dim=-1, keepdim=True)
    drawn = torch.minimum(drawn, last)
    return torch.where(greedy, logits.argmax(dim=-1), drawn[:, 0])
