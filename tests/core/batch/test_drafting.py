"""Drafters guess, draws decide: the distribution is the model's own, and so are greedy answers; more come by hook."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from polymux.core.batch.decoder import TokenBatch, TokenModel
from polymux.core.batch.drafting import Drafting, DraftModel, open_drafter
from polymux.core.batch.drawing import Drawer
from polymux.core.batch.packing import Packer
from polymux.core.batch.sequence import TokenRow
from polymux.core.batch.speculation import Drafter, Foresight, LookupDrafter
from polymux.core.batch.tokens import TokenStage
from polymux.core.cache.blocks import paged_kv
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device
from polymux.core.compute.fast import accelerate
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.errors import ConfigError, ModelError
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.plugins import load_plugins
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama, tiny_qwen3

Open = Callable[[Site], Drafter]


def disturb(model: torch.nn.Module, strength: float = 0.03) -> TransformersDecoder:
    """A copy that is often of the model's mind, and often not."""
    generator = torch.Generator().manual_seed(1)
    other = build(lambda: type(model)(copy.deepcopy(model.config)))  # type: ignore[operator]
    with torch.no_grad():
        for parameter, truth in zip(other.parameters(), model.parameters(), strict=True):
            parameter.copy_(truth + strength * torch.randn(truth.shape, generator=generator))
    return TransformersDecoder(other)


def open_driver(decoder: TokenModel, drafter: Open | None = None, **settings: Any) -> Driver:
    limits = SiteSettings(**{"cache_bytes": 1 << 24, "superpage": 1 << 18, **settings})
    site = Site(Device(), limits, (NativeAttention(),))
    stage = TokenStage("decode", decoder, site, drafter=drafter(site) if drafter is not None else None)
    return Driver(Loop(site, {"m": GenerationProgram(stage, "m")}))


def guessed(driver: Driver) -> tuple[int, int]:
    receipts = [driver.receipt(job) for job in driver.reports]
    return sum(each.guessed_units for each in receipts if each), sum(each.accepted_units for each in receipts if each)


VOCABULARY, LENGTH, DRAWS = 5, 4, 2000


TRUNCATED = Sampling(temperature=0.8, top_p=0.9)


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [
        ("lookup", Sampling(temperature=1.0)),
        pytest.param("model", Sampling(temperature=1.0), marks=pytest.mark.slow),
        pytest.param("lookup", TRUNCATED, marks=pytest.mark.slow),
        pytest.param("model", TRUNCATED, marks=pytest.mark.slow),
    ],
)
def test_draws_have_the_models_own_distribution(kind: str, sampling: Sampling) -> None:
    """Chi-square over all texts of four tokens, of which three are checked against guesses."""
    model = build(lambda: tiny_llama(VOCABULARY))
    with torch.no_grad():
        model.lm_head.weight *= 0.25  # every token has a chance
    truth = TransformersDecoder(copy.deepcopy(model))
    random = Random(0)
    prompt = [random.randrange(VOCABULARY) for _ in range(80)]  # whatever three tokens come, they came before
    drafter: Open = (
        (lambda site: LookupDrafter(4)) if kind == "lookup" else (lambda site: DraftModel(disturb(model), site, 4))
    )
    driver = open_driver(truth, drafter)
    for seed in range(0, DRAWS, 500):
        seeds = list(range(seed, seed + 500))
        work = GenerateWork(prompts=[prompt], max_tokens=[LENGTH], seeds=seeds, n=500, sampling=sampling)
        driver.submit(f"{seed}", "m", "complete", work)
    driver.finish()
    drafted, accepted = guessed(driver)
    assert 0 < accepted < drafted
    told = Counter(tuple(driver.tokens(f"{seed}", branch)) for seed in range(0, DRAWS, 500) for branch in range(500))
    check_fit(told, expect(model, prompt, sampling))


def expect(model: torch.nn.Module, prompt: list[int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """How likely each text of `LENGTH` tokens is, from the model alone."""
    likely: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(LENGTH):
        texts = list(likely)
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *text] for text in texts])).logits[:, -1].double()
        probabilities = (logits / sampling.temperature).softmax(dim=-1)
        ordered, order = probabilities.sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        probabilities = torch.zeros_like(ordered).scatter_(1, order, ordered.where(before < sampling.top_p, 0.0))
        probabilities /= probabilities.sum(dim=-1, keepdim=True)
        likely = {
            (*text, token): likely[text] * probability
            for text, row in zip(texts, probabilities.tolist(), strict=True)
            for token, probability in enumerate(row)
            if probability > 0
        }
    return likely


def check_fit(told: Counter[tuple[int, ...]], likely: Mapping[tuple[int, ...], float]) -> None:
    """Pearson's chi-square, rare texts together, by the normal approximation of Wilson and Hilferty (1931)."""
    assert set(told) <= set(likely)
    total = sum(told.values())
    common = [text for text, share in likely.items() if share * total >= 5]
    cells = [(told[text], likely[text] * total) for text in common]
    rest = sum(cells_of(told, common)), total - sum(expected for _, expected in cells)
    if rest[1] >= 5:
        cells.append(rest)
    statistic = sum((seen - expected) ** 2 / expected for seen, expected in cells)
    freedom = len(cells) - 1
    assert freedom > 20
    z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert abs(z) < 4


def cells_of(told: Counter[tuple[int, ...]], common: Sequence[tuple[int, ...]]) -> list[int]:
    return [count for text, count in told.items() if text not in set(common)]


@pytest.mark.parametrize(
    ("kind", "tier"),
    [
        ("lookup", "fast"),
        ("akin", "fast"),
        pytest.param("distant", "fast", marks=pytest.mark.slow),
        pytest.param("lookup", "reference", marks=pytest.mark.slow),
        pytest.param("akin", "reference", marks=pytest.mark.slow),
    ],
)
def test_greedy_answers_to_200_prompts_are_the_same(kind: str, tier: str) -> None:
    model = build(tiny_llama)
    kinds: dict[str, Open] = {
        "lookup": lambda site: LookupDrafter(6),
        "akin": lambda site: DraftModel(disturb(model, 0.01), site, 6),
        "distant": lambda site: DraftModel(TransformersDecoder(build(tiny_qwen3, seed=3)), site, 6),
    }
    decoder = TransformersDecoder(build(tiny_llama))
    drivers = [open_driver(accelerate(decoder) if tier == "fast" else decoder, each) for each in (None, kinds[kind])]
    random = Random(0)
    for number in range(200):
        few = random.sample(range(97), 4)  # repeats itself, so that looking back finds something
        prompt = [random.choice(few) for _ in range(random.randint(1, 40))]
        work = GenerateWork(prompts=[prompt], max_tokens=[16], seeds=[0], sampling=Sampling(temperature=0.0))
        for driver in drivers:
            driver.submit(f"{number}", "m", "complete", work)
    for driver in drivers:
        driver.finish()
    plain, bold = drivers
    assert guessed(bold)[0] > 0
    assert [bold.tokens(f"{i}") for i in range(200)] == [plain.tokens(f"{i}") for i in range(200)]


def test_a_good_draft_model_saves_steps_and_the_receipt_says_how_often_it_was_right() -> None:
    model = build(tiny_llama)
    work = GenerateWork(prompts=[[5, 6, 7]], max_tokens=[60], seeds=[0], sampling=Sampling(temperature=0.7))
    launches = []
    for drafter in (None, lambda site: DraftModel(TransformersDecoder(build(tiny_llama)), site, 5)):
        driver = open_driver(TransformersDecoder(model), drafter)
        driver.submit("a", "m", "complete", work)
        driver.finish()
        launches.append(driver.loop.launches)
    receipt = driver.receipt("a")
    assert receipt is not None and receipt.guessed_units >= receipt.accepted_units >= 45
    assert launches[0] / launches[1] > 4


def test_how_far_a_row_looks_ahead_follows_what_was_right() -> None:
    foresight = Foresight(8)
    assert foresight.reach([]) == 8
    for accepted, length in ((0, 4), (3, 2), (2, 4), (4, 8), (8, 8), (1, 4), (0, 2), (0, 1), (0, 1)):
        foresight.learn(foresight.length, accepted)
        assert foresight.reach([]) == length


def test_found_prefixes_are_found_for_the_draft_model_too() -> None:
    """The second answer starts from cached blocks, and its guesses are as good as the first one's."""
    model = build(tiny_llama)
    driver = open_driver(
        TransformersDecoder(model), lambda site: DraftModel(TransformersDecoder(build(tiny_llama)), site, 5)
    )
    for job in "ab":
        work = GenerateWork(prompts=[[7] * 70], max_tokens=[30], seeds=[0], sampling=Sampling(temperature=0.0))
        driver.submit(job, "m", "complete", work)
        driver.finish()
    first, second = driver.receipt("a"), driver.receipt("b")
    assert first is not None and second is not None
    assert second.cached_units == 64 and second.accepted_units == first.accepted_units > 20


class Seer(Drafter):
    """Guesses from the hidden states, as drafters of the EAGLE kind do; keeps keys and values of its own."""

    wants_hidden = True

    def __init__(self, site: Site) -> None:
        self.cache = paged_kv("seer", layers=1, heads=2, dim=8, dtype=torch.float32, block=site.settings.block)
        self.seen: list[tuple[int, ...]] = []

    def bind(self, packer: Packer, drawer: Drawer) -> None:
        assert packer.extra is not None and packer.extra.shape[1:] == self.cache.shape  # type: ignore[union-attr]

    def open(self, row: TokenRow) -> Foresight:
        return Foresight(3)

    def draft(self, rows: Sequence[TokenRow], counts: Sequence[int]) -> list[list[int]]:
        return [[row.tokens[-1]] * count for row, count in zip(rows, counts, strict=True)]

    def follow(self, batch: TokenBatch) -> None:
        assert batch.hidden is not None and batch.hidden.shape == (len(batch.ids), 32)
        self.seen.append(tuple(batch.hidden.shape))


@pytest.mark.parametrize("fast", [False, True])
def test_a_drafter_of_another_kind_sees_hidden_states_and_has_a_part_of_the_cache(fast: bool) -> None:
    decoder: TokenModel = TransformersDecoder(build(tiny_llama))
    seers: list[Seer] = []

    def open_seer(site: Site) -> Seer:
        seers.append(Seer(site))
        return seers[0]

    plain, bold = open_driver(decoder), open_driver(accelerate(decoder) if fast else decoder, open_seer)  # type: ignore[arg-type]
    for driver in (plain, bold):
        work = GenerateWork(prompts=[[5, 6, 7]], max_tokens=[20], seeds=[0], sampling=Sampling(temperature=0.0))
        driver.submit("a", "m", "complete", work)
        driver.finish()
    assert bold.tokens("a") == plain.tokens("a") and guessed(bold)[0] > 0 and seers[0].seen


def test_kinds_of_drafters_come_by_hook(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from polymux.core.batch.drafting import Drafting\n"
        "from polymux.core.batch.speculation import LookupDrafter\n"
        "from polymux.core.hooks import hookimpl\n"
        "class Mine(Drafting):\n"
        "    name = 'mine'\n"
        "    def open(self, model, tokens, options, site):\n"
        "        return LookupDrafter(tokens + options['more'])\n"
        "@hookimpl\n"
        "def drafters():\n"
        "    return [Mine()]\n"
    )
    [kind] = load_plugins([tmp_path]).drafters()
    assert isinstance(kind, Drafting)
    decoder, site = TransformersDecoder(build(tiny_llama)), Site(settings=SiteSettings(cache_bytes=1 << 26))
    drafter = open_drafter({"drafter": "mine", "tokens": 2, "more": 3}, decoder, site, [kind])
    assert isinstance(drafter, LookupDrafter)


@pytest.mark.parametrize(
    "asked",
    [
        33,
        -1,
        True,
        "much",
        {"drafter": "nobody"},
        {"drafter": "model"},
        {"drafter": "model", "model": 3},
        {"drafter": "lookup", "tokens": 1.5},
        {"tokens": 3},
    ],
)
def test_options_that_make_no_sense_are_refused(asked: Any) -> None:
    decoder, site = TransformersDecoder(build(tiny_llama)), Site(settings=SiteSettings(cache_bytes=1 << 26))
    with pytest.raises((ConfigError, ModelError), match="speculation"):
        open_drafter(asked, decoder, site)


@pytest.mark.parametrize("asked", [None, 0, {"drafter": "lookup", "tokens": 0}])
def test_nothing_asked_for_is_nothing_guessed(asked: Any) -> None:
    decoder, site = TransformersDecoder(build(tiny_llama)), Site(settings=SiteSettings(cache_bytes=1 << 26))
    assert open_drafter(asked, decoder, site) is None


@pytest.mark.parametrize("make", [lambda: tiny_llama(50), lambda: tiny_llama(context=64)])
def test_a_draft_model_of_other_tokens_or_a_shorter_context_is_refused(make: Callable[[], torch.nn.Module]) -> None:
    draft = TransformersDecoder(build(make))
    with pytest.raises(ConfigError, match="draft model"):
        open_driver(TransformersDecoder(build(tiny_llama)), lambda site: DraftModel(draft, site, 4))


def test_rows_that_leave_or_fail_take_nothing_of_the_draft_with_them() -> None:
    model = build(tiny_llama)
    driver = open_driver(
        TransformersDecoder(model),
        lambda site: DraftModel(disturb(model), site, 5),
        cache_bytes=5 << 15,
        superpage=1 << 15,
        max_rows=4,
    )
    for number in range(12):
        work = GenerateWork(
            prompts=[[number] * 30], max_tokens=[40], seeds=[number], sampling=Sampling(temperature=1.0)
        )
        driver.submit(f"{number}", "m", "complete", work)
        driver.run(3)
        if number % 3 == 0:
            driver.cancel(f"{number}")
    driver.finish()
    assert all(len(driver.tokens(f"{i}")) == 40 for i in range(12) if i % 3)
    assert sum(each.preemptions for i in range(12) if (each := driver.receipt(f"{i}"))) > 0
