"""The property the runtime stands on: whatever shares a launch, a cache or a moment, the tokens are `generate`'s own.

Tiny random models in float32, against transformers one by one: greedy tokens equal, logprobs within 2e-4, for any mix
of batch and chunk and block size, cache size (a small one preempts), shared prefixes, joins, leaves, branches and
launch-ahead, on both tiers. After every example the engine proves that it holds nothing.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.batch.tokens import TokenModel, TokenStage
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.compute.fast import FastDecoder, accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import DECODERS, VOCABULARY, build

LONGEST = 12
"""New tokens of the longest answer."""

SEED = 6
"""Chosen so that no greedy choice is within rounding of the second best."""

GREEDY = Sampling(temperature=0.0)


def make_prompts() -> list[list[int]]:
    """Some share a prefix of 9, 16 or all their tokens; one has a single token."""
    random = Random(SEED)
    base = [random.randrange(3, VOCABULARY) for _ in range(24)]
    own = [[random.randrange(3, VOCABULARY) for _ in range(length)] for length in (1, 2, 7, 13, 31)]
    return [base, base[:16], base[:16] + own[2], base[:9] + own[3], [*base, 5], *own]


PROMPTS = make_prompts()


@dataclass
class Truth:
    """What transformers says about one prompt."""

    tokens: list[int]
    logprobs: list[torch.Tensor]
    """Per place, over the vocabulary."""


@cache
def model_of(family: str) -> torch.nn.Module:
    return build(DECODERS[family])


@cache
def decoder_of(family: str, fast: bool) -> TokenModel:
    reference = TransformersDecoder(copy.deepcopy(model_of(family)))
    if not fast:
        return reference
    decoder = accelerate(reference)
    assert isinstance(decoder, FastDecoder)
    return decoder


@cache
def truth_of(family: str, prompt: int) -> Truth:
    model = model_of(family)
    ids = torch.tensor([PROMPTS[prompt]])
    result = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=LONGEST,
        do_sample=False,
        eos_token_id=None,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logprobs = [logits[0].log_softmax(-1) for logits in result.logits]
    for values in logprobs:
        best = values.topk(2).values
        assert best[0] - best[1] > 5e-4, "choose another seed: rounding could turn this choice"
    return Truth(result.sequences[0, len(PROMPTS[prompt]) :].tolist(), logprobs)


@dataclass(frozen=True)
class Request:
    prompt: int
    tokens: int
    choices: int
    join: int
    """The step before which it is submitted."""
    leave: int | None
    """Steps after which it is cancelled."""
    stop: int | None
    """It stops at what the truth has at this place."""
    logprobs: int | None
    priority: int


@dataclass(frozen=True)
class Engine:
    family: str
    lagged: bool
    rows: int
    units: int
    block: int
    room: int | None
    """Tokens that the cache holds; None: plenty."""
    deterministic: bool
    fast: bool = False
    """The fast tier in place of the reference, on the machine's own kernels where it has them."""

    def open(self) -> Driver:
        decoder = decoder_of(self.family, self.fast)
        shape = decoder.shape
        bytes_of_block = shape.layers * 2 * self.block * shape.kv_heads * shape.head_dim * 4
        superpage = 4 * (-(-bytes_of_block // 512) * 512)
        pages = -(-(self.room or 2000) // (4 * self.block))
        site = Site(
            LaggedCpu() if self.lagged else Device(),
            SiteSettings(
                max_rows=self.rows,
                max_units=self.units,
                block=self.block,
                cache_bytes=pages * superpage,
                superpage=superpage,
                deterministic=self.deterministic,
            ),
            (NativeAttention(),) if self.fast else (),
        )
        return Driver(Loop(site, {"m": GenerationProgram(TokenStage("decode", decoder, site), "m")}))


requests = st.builds(
    Request,
    prompt=st.integers(0, len(PROMPTS) - 1),
    tokens=st.integers(1, LONGEST),
    choices=st.sampled_from([1, 1, 1, 3]),
    join=st.integers(0, 12),
    leave=st.one_of(st.none(), st.none(), st.integers(0, 12)),
    stop=st.one_of(st.none(), st.integers(0, LONGEST - 1)),
    logprobs=st.sampled_from([None, 0, 2]),
    priority=st.sampled_from([0, 0, 1]),
)

engines = st.builds(
    Engine,
    family=st.sampled_from(sorted(DECODERS)),
    lagged=st.booleans(),
    rows=st.integers(1, 6),
    units=st.sampled_from([1, 5, 16, 64]),
    block=st.sampled_from([2, 4, 16]),
    room=st.sampled_from([None, 48, 64]),
    deterministic=st.booleans(),
    fast=st.booleans(),
)


def check(engine: Engine, asked: list[Request]) -> None:
    driver = engine.open()
    for step in range(26):
        for number, request in enumerate(asked):
            if request.join == step:
                driver.submit(str(number), "m", "chat", work_of(engine, request), priority=request.priority)
            if request.leave is not None and request.join + request.leave == step:
                driver.cancel(str(number))
        driver.step()
    driver.finish()
    for number, request in enumerate(asked):
        for choice in range(request.choices):
            check_choice(driver, str(number), choice, truth_of(engine.family, request.prompt), request)


def work_of(engine: Engine, request: Request) -> GenerateWork:
    truth = truth_of(engine.family, request.prompt)
    return GenerateWork(
        prompts=[PROMPTS[request.prompt]],
        max_tokens=[request.tokens],
        seeds=[0] * request.choices,
        n=request.choices,
        sampling=GREEDY,
        stop_token_ids=[] if request.stop is None else [truth.tokens[request.stop]],
        logprobs=request.logprobs,
    )


def check_choice(driver: Driver, job: str, choice: int, truth: Truth, request: Request) -> None:
    expected = truth.tokens[: request.tokens]
    reason = "length"
    if request.stop is not None and truth.tokens[request.stop] in expected:
        expected = expected[: expected.index(truth.tokens[request.stop]) + 1]
        reason = "stop"
    tokens = driver.tokens(job, choice)
    if request.leave is not None and driver.receipt(job) is None:
        assert driver.error(job) is None
        assert tokens == expected[: len(tokens)]
    else:
        assert driver.error(job) is None
        assert tokens == expected
        assert driver.reasons(job)[choice] == reason
    if request.logprobs is not None:
        values = driver.logprobs(job, choice)
        assert len(values) == len(tokens)
        for place, (token, value) in enumerate(zip(tokens, values)):
            assert abs(value - float(truth.logprobs[place][token])) < 2e-4
    for place, best in enumerate(driver.top(job, choice)):
        wanted = truth.logprobs[place].topk(2).values.tolist()
        assert [value for _, value in best] == pytest.approx(wanted, abs=2e-4)


@settings(max_examples=80, deadline=None)
@given(engines, st.lists(requests, min_size=1, max_size=7))
def test_tokens_are_those_of_generate(engine: Engine, asked: list[Request]) -> None:
    check(engine, asked)


@pytest.mark.slow
@settings(max_examples=600, deadline=None)
@given(engines, st.lists(requests, min_size=1, max_size=16))
def test_tokens_are_those_of_generate_at_length(engine: Engine, asked: list[Request]) -> None:
    check(engine, asked)


def ask(tokens: int = LONGEST, **options: object) -> Request:
    settled = {"prompt": 0, "choices": 1, "join": 0, "leave": None, "stop": None, "logprobs": 2, "priority": 0}
    return Request(tokens=tokens, **{**settled, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("family", sorted(DECODERS))
def test_preempted_rows_go_on_where_they_were(family: str, lagged: bool) -> None:
    """A cache for one and a half rows serves four at once: the newest make room, and lose nothing."""
    engine = Engine(family, lagged, rows=4, units=64, block=4, room=64, deterministic=False)
    asked = [ask(prompt=prompt, priority=priority) for prompt, priority in ((9, 0), (4, 0), (8, 1), (2, 0))]
    check(engine, asked)
    driver = engine.open()
    for number, request in enumerate(asked):
        driver.submit(str(number), "m", "chat", work_of(engine, request), priority=request.priority)
    driver.finish()
    assert driver.loop.stats()["preemptions_total"] > 0


@pytest.mark.parametrize("lagged", [False, True])
def test_shared_prefixes_are_computed_once(lagged: bool) -> None:
    """The second of two equal prompts computes only what no full block covers; so do all branches but the first."""
    engine = Engine("llama", lagged, rows=8, units=64, block=4, room=None, deterministic=False)
    check(engine, [ask(prompt=0), ask(prompt=0, join=8), ask(prompt=2, join=16)])
    driver = engine.open()
    for number, prompt in enumerate((0, 0, 2)):
        driver.submit(str(number), "m", "chat", work_of(engine, ask(prompt=prompt, choices=3)))
        driver.run()
    receipts = [driver.receipt(str(number)) for number in range(3)]
    assert [receipt.cached_units for receipt in receipts if receipt] == [0, 20, 16]
    assert driver.loop.stats()["prefix_cache_hits_total"] == 2 * 20 + 20 * 3 + 16 + 2 * 20


def test_a_tenants_salt_keeps_its_prefixes_to_itself() -> None:
    engine = Engine("llama", False, rows=8, units=64, block=4, room=None, deterministic=False)
    driver = engine.open()
    for job, salt in (("a", "one"), ("b", "two"), ("c", "one")):
        work = work_of(engine, ask())
        work.salt = salt
        driver.submit(job, "m", "chat", work)
        driver.run()
    cached = [receipt.cached_units for job in "abc" if (receipt := driver.receipt(job))]
    assert cached == [0, 0, 20]


def sampled(driver: Driver, job: str, prompt: int, sampling: Sampling, seed: int) -> None:
    work = GenerateWork(prompts=[PROMPTS[prompt]], max_tokens=[LONGEST], seeds=[seed], sampling=sampling)
    driver.submit(job, "m", "chat", work)


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.0), Sampling(top_p=0.8, presence_penalty=0.5)])
def test_a_row_says_the_same_alone_and_among_sixteen(sampling: Sampling, lagged: bool) -> None:
    """Deterministic mode: neighbours with other options, lengths and moments of arrival change nothing."""
    engine = Engine("qwen3", lagged, rows=17, units=16, block=4, room=None, deterministic=True)
    alone = engine.open()
    sampled(alone, "it", 9, sampling, seed=42)
    alone.finish()
    crowd = engine.open()
    others = [Sampling(top_k=3), Sampling(temperature=2.0, min_p=0.05), GREEDY, Sampling(frequency_penalty=1.0)]
    for number in range(16):
        if number == 7:
            sampled(crowd, "it", 9, sampling, seed=42)
        sampled(crowd, str(number), number % len(PROMPTS), others[number % 4], seed=number)
        crowd.step()
    crowd.finish()
    assert crowd.tokens("it") == alone.tokens("it")


def test_a_seed_fixes_the_text_and_another_changes_it() -> None:
    engine = Engine("llama", True, rows=8, units=64, block=4, room=None, deterministic=False)
    driver = engine.open()
    for job, seed in (("a", 1), ("b", 1), ("c", 2)):
        sampled(driver, job, 3, Sampling(), seed)
    driver.finish()
    assert driver.tokens("a") == driver.tokens("b") != driver.tokens("c")


def test_a_preempted_rows_sampling_goes_on_where_it_was() -> None:
    """Seeds, positions and penalties survive a preemption: the text is that of an engine with plenty of room."""
    sampling = Sampling(frequency_penalty=1.5, repetition_penalty=1.2, top_k=40)
    texts = []
    for room in (None, 56):
        driver = Engine("llama", True, rows=4, units=64, block=4, room=room, deterministic=False).open()
        for number, prompt in enumerate((9, 4, 2, 8)):
            sampled(driver, str(number), prompt, sampling, seed=number)
        driver.finish()
        texts.append([driver.tokens(str(number)) for number in range(4)])
    assert driver.loop.stats()["preemptions_total"] > 0
    assert texts[0] == texts[1]
