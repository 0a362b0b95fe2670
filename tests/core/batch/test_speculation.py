"""Guesses change no token, at any temperature, in any company; on text that repeats itself they save steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.batch.drafting import DraftModel
from polymux.core.batch.speculation import MATCHED, Drafter, LookupDrafter, PromptLookup
from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama, tiny_qwen3


@cache
def decoder_of() -> TransformersDecoder:
    return TransformersDecoder(build(tiny_llama))


@cache
def distant_of() -> TransformersDecoder:
    """Another model of the same tokens, of other sizes: it is hardly ever right."""
    return TransformersDecoder(build(tiny_qwen3, seed=7))


@cache
def akin_of() -> TransformersDecoder:
    """A disturbed copy: right about as often as a draft model should be."""
    model = build(tiny_llama)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.02 * torch.randn(parameter.shape, generator=generator)
    return TransformersDecoder(model)


DRAFTERS: dict[str, Callable[[Site, int], Drafter]] = {
    "lookup": lambda site, guesses: LookupDrafter(guesses),
    "akin": lambda site, guesses: DraftModel(akin_of(), site, guesses),
    "distant": lambda site, guesses: DraftModel(distant_of(), site, guesses),
}


def open_driver(
    guesses: int,
    *,
    lagged: bool = False,
    units: int = 512,
    pages: int = 60,
    kind: str = "lookup",
    model: TransformersDecoder | None = None,
) -> Driver:
    decoder = model or decoder_of()
    blocks = 3 if kind != "lookup" and guesses else 1  # a draft model's keys and values lie beside the model's
    page = blocks * 4 * 16 * decoder.shape.layers * 2 * decoder.shape.kv_heads * decoder.shape.head_dim * 4
    limits = SiteSettings(max_rows=6, max_units=units, block=16, cache_bytes=pages * page, superpage=page)
    site = Site(LaggedCpu() if lagged else Device(), limits)
    stage = TokenStage("decode", decoder, site, drafter=DRAFTERS[kind](site, guesses) if guesses else None)
    return Driver(Loop(site, {"m": GenerationProgram(stage, "m")}))


def make_work(prompt: list[int], seed: int, tokens: int, **options: Any) -> GenerateWork:
    return GenerateWork(prompts=[prompt], max_tokens=[tokens], seeds=[seed, seed + 1], n=2, **options)


def repeat(length: int, seed: int) -> list[int]:
    """A prompt of few different tokens: the same three occur again and again."""
    random = Random(seed)
    return [random.choice([5, 6, 7]) for _ in range(length)]


LIKELY = {5: 30.0, 6: 30.0, 7: 30.0}
"""A bias that keeps answers to the prompt's tokens, so that guesses are often right and often wrong."""


@settings(max_examples=30, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=5),
    temperature=st.sampled_from([0.0, 0.7, 1.0]),
    guesses=st.integers(1, 9),
    lagged=st.booleans(),
    units=st.sampled_from([5, 512]),
    pages=st.sampled_from([3, 60]),
    logprobs=st.sampled_from([None, 2]),
    stops=st.booleans(),
    kind=st.sampled_from(sorted(DRAFTERS)),
)
def test_guesses_change_no_token(
    lengths: list[int],
    temperature: float,
    guesses: int,
    lagged: bool,
    units: int,
    pages: int,
    logprobs: int | None,
    stops: bool,
    kind: str,
) -> None:
    plain = open_driver(0)
    bold = open_driver(guesses, lagged=lagged, units=units, pages=pages, kind=kind)
    sampling = Sampling(temperature=temperature, logit_bias=LIKELY)
    for i, length in enumerate(lengths):
        work = make_work(
            repeat(length, i), i, 25, sampling=sampling, logprobs=logprobs, stop_token_ids=[7] if stops else []
        )
        for driver in (plain, bold):
            driver.submit(f"{i}", "m", "chat", work)
        bold.run(2)
    plain.finish()
    bold.finish()
    for i in range(len(lengths)):
        for branch in range(2):
            assert bold.tokens(f"{i}", branch) == plain.tokens(f"{i}", branch)
            assert bold.logprobs(f"{i}", branch) == pytest.approx(plain.logprobs(f"{i}", branch), abs=2e-4)
        assert bold.reasons(f"{i}") == plain.reasons(f"{i}")


@pytest.mark.parametrize("lagged", [False, True])
def test_text_that_repeats_itself_takes_fewer_steps(lagged: bool) -> None:
    """A model that says over and over what it was told."""
    prompt = [5, 6, 7, 8, 9, 10, 11, 12] * 3

    class Parrot(TransformersDecoder):
        """The token eight places back is certain."""

        def forward(self, batch: Any) -> torch.Tensor:
            logits = super().forward(batch)
            following = (batch.positions[batch.sampled] + 1) % 8 + 5
            return logits.scatter(1, following[:, None], 1e4)

    def steps(guesses: int) -> tuple[int, list[int]]:
        driver = open_driver(guesses, lagged=lagged)
        driver.loop.programs["m"].stages[0].model = Parrot(build(tiny_llama))  # type: ignore[attr-defined]
        driver.submit("a", "m", "chat", make_work(prompt, 0, 64, sampling=Sampling(temperature=1.0)))
        driver.finish()
        receipt = driver.receipt("a")
        assert receipt is not None and receipt.accepted_units <= receipt.guessed_units
        assert (receipt.guessed_units > 0) == (guesses > 0)
        return driver.loop.launches, driver.tokens("a")

    before, truth = steps(0)
    after, tokens = steps(8)
    assert tokens == truth == [place % 8 + 5 for place in range(24, 88)]
    assert before / after > (3 if not lagged else 1.8)


def test_rows_whose_draws_depend_on_more_do_not_guess() -> None:
    driver = open_driver(8)
    driver.submit("a", "m", "chat", make_work(repeat(30, 0), 0, 20, sampling=Sampling(frequency_penalty=0.5)))
    driver.finish()
    receipt = driver.receipt("a")
    assert receipt is not None and receipt.guessed_units == 0


def test_the_guess_is_what_followed_last_time() -> None:
    lookup = PromptLookup(4)
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3]) == [4, 5, 6, 1]
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 9]) == []
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3]) == [9, 1, 2, 3]
    lookup.learn(4, 0)
    assert lookup.guess([1, 2, 3, 4, 5, 6, 1, 2, 3, 9, 1, 2, 3, 9, 1]) == [2, 3]
    assert PromptLookup(4).guess([1] * (MATCHED - 1)) == []


@settings(max_examples=50, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), max_size=60), longest=st.integers(1, 6))
def test_a_guess_occurred_before(tokens: list[int], longest: int) -> None:
    lookup = PromptLookup(longest)
    for end in range(len(tokens) + 1):
        guess = lookup.guess(tokens[:end])
        key = tokens[max(end - MATCHED, 0) : end]
        assert not guess or any(
            tokens[at : at + MATCHED] == key and tokens[at + MATCHED : at + MATCHED + len(guess)] == guess
            for at in range(end - MATCHED)
        )
