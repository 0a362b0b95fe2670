"""Sampling: the distributions, penalties and seeds that callers are promised, and rows that never touch each other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.compute.sampling import Penalties, SampleBatch, Samples, draw_uniform, sample
from polymux.core.tasks import Sampling

CPU = torch.device("cpu")
VOCABULARY = 12
LOGITS = torch.linspace(2.0, -3.0, VOCABULARY)[torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(4))]


def draw(
    logits: torch.Tensor,
    samplings: list[Sampling],
    *,
    seeds: list[int] | None = None,
    positions: list[int] | None = None,
    penalties: list[Penalties | None] | None = None,
    logprobs: int | None = None,
) -> Samples:
    rows = len(samplings)
    batch = SampleBatch(
        samplings=samplings,
        seeds=seeds or [0] * rows,
        positions=positions or list(range(rows)),
        penalties=penalties or [None] * rows,
        logprobs=logprobs,
    )
    return sample(logits, batch)


def truncate(logits: np.ndarray, sampling: Sampling) -> np.ndarray:
    """The distribution as the papers state it, in float64: temperature, top-k, nucleus, min-p, each renormalised last.

    Nucleus: the fewest best tokens that reach top_p (Holtzman et al. 2020); min-p: Nguyen et al. 2024.
    """
    scaled = logits.astype(np.float64) / sampling.temperature
    weights = np.exp(scaled - scaled.max())
    weights /= weights.sum()
    kept, reached = [], 0.0
    for rank, token in enumerate(np.argsort(-weights, kind="stable")):
        if sampling.top_k and rank >= sampling.top_k:
            break
        if rank and reached >= sampling.top_p:
            break
        if weights[token] < sampling.min_p * weights.max():
            break
        kept.append(token)
        reached += weights[token]
    result = np.zeros_like(weights)
    result[kept] = weights[kept]
    return result / result.sum()


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.4),
        Sampling(temperature=2.5),
        Sampling(top_k=4),
        Sampling(top_k=VOCABULARY * 9),
        Sampling(top_p=0.7),
        Sampling(min_p=0.2),
        Sampling(temperature=1.7, top_k=7, top_p=0.8, min_p=0.1),
    ],
    ids=lambda sampling: str(sampling).removeprefix("Sampling"),
)
def test_draws_follow_the_distribution(sampling: Sampling) -> None:
    """8,000 draws against the softmax that the options leave: chi-square, and nothing that was cut ever comes up."""
    count = 8_000
    tokens = draw(LOGITS.expand(count, -1), [sampling] * count, seeds=list(range(count)), positions=[5] * count).tokens
    seen = np.bincount(tokens.numpy(), minlength=VOCABULARY)
    expected = truncate(LOGITS.numpy(), sampling) * count
    assert not seen[expected == 0].any()
    likely = expected > 0
    chi_square = ((seen - expected)[likely] ** 2 / expected[likely]).sum()
    freedom = max(int(likely.sum()) - 1, 1)
    assert chi_square < freedom + 5 * np.sqrt(2 * freedom), (seen, expected)


def test_draws_at_successive_positions_are_independent() -> None:
    """One row's own sequence of uniform numbers: flat, and without correlation from one position to the next."""
    uniform = draw_uniform(torch.full((50_000,), 7), torch.arange(50_000)).numpy()
    assert uniform.min() >= 0.0 and uniform.max() < 1.0
    counts = np.histogram(uniform, bins=64, range=(0, 1))[0]
    assert ((counts - 50_000 / 64) ** 2 / (50_000 / 64)).sum() < 63 + 5 * np.sqrt(2 * 63)
    assert abs(np.corrcoef(uniform[:-1], uniform[1:])[0, 1]) < 0.02
    neighbours = draw_uniform(torch.arange(50_000), torch.zeros(50_000, dtype=torch.int64)).numpy()
    assert abs(np.corrcoef(neighbours[:-1], neighbours[1:])[0, 1]) < 0.02


def test_extreme_seeds_draw_too() -> None:
    seeds = torch.tensor([0, 1, 2**63 - 1, -(2**63)])
    uniform = draw_uniform(seeds, torch.tensor([0, 2**40, 2**40, 3]))
    assert ((uniform >= 0) & (uniform < 1)).all()
    assert len(set(uniform.tolist())) == 4


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-30, 0.3, 1.0, 2.0]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    top_k=st.sampled_from([0, 1, 3, VOCABULARY, 10 * VOCABULARY]),
    min_p=st.sampled_from([0.0, 0.2, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.5]),
    logit_bias=st.sampled_from([{}, {3: 4.0}, {0: -100.0, 11: 100.0}]),
)


def penalties_of(sampling: Sampling, prompt: list[int], generated: list[int]) -> Penalties | None:
    return Penalties.of(prompt, generated, VOCABULARY, CPU) if sampling.repetition_penalty != 1.0 else None


@settings(max_examples=80, deadline=None)
@given(st.lists(samplings, min_size=2, max_size=6), st.integers(0, 2**63 - 1))
def test_a_row_draws_the_same_alone_and_among_others(rows: list[Sampling], seed: int) -> None:
    """Whatever its neighbours ask for: their top-k, penalties, bias and temperatures are theirs."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), VOCABULARY, generator=generator) * 3
    together = draw(
        logits,
        rows,
        seeds=[seed ^ row for row in range(len(rows))],
        positions=[3 + row for row in range(len(rows))],
        penalties=[penalties_of(row, [1, 2], [3]) for row in rows],
        logprobs=2,
    )
    for place, row in enumerate(rows):
        alone = draw(
            logits[place : place + 1],
            [row],
            seeds=[seed ^ place],
            positions=[3 + place],
            penalties=[penalties_of(row, [1, 2], [3])],
            logprobs=2,
        )
        assert alone.tokens[0] == together.tokens[place]
        assert alone.logprobs is not None and together.logprobs is not None
        assert alone.logprobs[0] == together.logprobs[place]


def test_only_seed_and_position_choose() -> None:
    """The same pair draws the same token; the other seeds and positions draw many."""
    logits = LOGITS.expand(200, -1)
    same = draw(logits, [Sampling()] * 200, seeds=[9] * 200, positions=[4] * 200).tokens
    assert len(set(same.tolist())) == 1
    seeds = draw(logits, [Sampling()] * 200, seeds=list(range(200)), positions=[4] * 200).tokens
    places = draw(logits, [Sampling()] * 200, seeds=[9] * 200, positions=list(range(200))).tokens
    assert len(set(seeds.tolist())) > 4
    assert len(set(places.tolist())) > 4


@settings(max_examples=60, deadline=None)
@given(
    sampling=st.builds(
        Sampling,
        temperature=st.just(0.0),
        presence_penalty=st.floats(-2, 2),
        frequency_penalty=st.floats(-2, 2),
        repetition_penalty=st.floats(0.5, 2).filter(lambda value: value != 1.0),
        logit_bias=st.dictionaries(st.integers(0, VOCABULARY - 1), st.floats(-100, 100), max_size=3),
    ),
    prompt=st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
    generated=st.lists(st.integers(0, VOCABULARY - 1), max_size=8),
)
def test_penalties_follow_their_formulas(sampling: Sampling, prompt: list[int], generated: list[int]) -> None:
    """Repetition (Keskar et al. 2019) over prompt and answer; frequency and presence (OpenAI) over the answer only."""
    values = LOGITS.numpy().astype(np.float64)
    for token in {*prompt, *generated}:
        factor = sampling.repetition_penalty
        values[token] = values[token] / factor if values[token] > 0 else values[token] * factor
    for token in set(generated):
        values[token] -= sampling.frequency_penalty * generated.count(token) + sampling.presence_penalty
    for token, bias in sampling.logit_bias.items():
        values[token] += bias
    best, second = np.sort(values)[-1], np.sort(values)[-2]
    if best - second < 1e-4:
        return  # a tie within rounding
    penalties = Penalties.of(prompt, generated, VOCABULARY, CPU)
    tokens = draw(LOGITS[None], [sampling], penalties=[penalties]).tokens
    assert tokens[0] == values.argmax()


def test_a_drawn_token_counts_for_the_next() -> None:
    """Launch k+1 is out before the host has seen token k: the counts live on the device."""
    penalties = Penalties.of([], [], VOCABULARY, CPU)
    sampling = Sampling(temperature=0.0, frequency_penalty=100.0)
    order = [int(draw(LOGITS[None], [sampling], penalties=[penalties]).tokens[0]) for _ in range(VOCABULARY)]
    assert order == LOGITS.argsort(descending=True).tolist()


def test_logprobs_are_the_models_own() -> None:
    """They are taken before penalties, bias and temperature; the chosen token's is among them."""
    sampling = Sampling(temperature=0.0, logit_bias={3: 100.0})
    result = draw(LOGITS[None], [sampling], logprobs=3)
    expected = LOGITS.log_softmax(-1)
    assert result.tokens[0] == 3
    assert result.logprobs is not None and result.top_logprobs is not None and result.top_tokens is not None
    assert result.logprobs[0] == pytest.approx(float(expected[3]))
    assert result.top_tokens[0].tolist() == expected.argsort(descending=True)[:3].tolist()
    assert result.top_logprobs[0].tolist() == sorted(result.top_logprobs[0].tolist(), reverse=True)


def test_more_alternatives_than_tokens() -> None:
    result = draw(LOGITS[None], [Sampling()], logprobs=VOCABULARY + 5)
    assert result.top_tokens is not None and result.top_tokens.shape == (1, VOCABULARY)


def test_greedy_takes_the_first_of_equals() -> None:
    logits = torch.zeros(3, VOCABULARY)
    logits[:, [4, 8]] = 1.0
    assert draw(logits, [Sampling(temperature=0.0)] * 3).tokens.tolist() == [4, 4, 4]
    assert draw(logits, [Sampling(top_k=1)] * 3).tokens.tolist() == [4, 4, 4]


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.5)])
def test_a_row_that_is_not_finite_is_told_and_disturbs_nobody(poison: float, sampling: Sampling) -> None:
    logits = LOGITS.expand(3, -1).clone()
    logits[1, 2] = poison
    everyone = [sampling, Sampling(top_k=3), sampling]
    result, clean = draw(logits, everyone), draw(LOGITS.expand(3, -1), everyone)
    assert result.finite.tolist() == [True, False, True]
    assert result.tokens[[0, 2]].tolist() == clean.tokens[[0, 2]].tolist()
    assert 0 <= result.tokens[1] < VOCABULARY


def test_an_overwhelming_logit_always_wins() -> None:
    """Rounding of the cumulative sum never lands on a token without probability."""
    logits = torch.full((1000, VOCABULARY), -200.0)
    logits[:, 5] = 200.0
    tokens = draw(logits, [Sampling()] * 1000, seeds=list(range(1000)), positions=[0] * 1000).tokens
    assert set(tokens.tolist()) == {5}


def test_the_tail_of_a_large_vocabulary_survives_a_neighbours_truncation() -> None:
    """top_p of 1 cuts nothing, although a float32 sum of 100,000 probabilities passes 1 before its end."""
    size = 100_000
    logits = torch.zeros(2, size)
    options: list[Any] = [Sampling(), Sampling(top_k=1)]
    seed = int(draw_uniform(torch.arange(size * 10), torch.zeros(size * 10, dtype=torch.int64)).argmax())
    tokens = draw(logits, options, seeds=[seed, 0], positions=[0, 0]).tokens
    assert tokens[0] > size * 0.9999
