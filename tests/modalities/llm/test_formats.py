"""Structured output on a running engine: whatever shares a launch with them, finished answers keep their format."""

from __future__ import annotations

import json
from functools import cache
from random import Random
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.guidance import GrammarStage
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork, Guidance, Thought
from polymux.core.tasks import Format, Sampling
from polymux.core.testing import tokenizers
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_llama
from polymux.core.text.grammar import Grammars, write_grammar
from polymux.core.text.tokenizer import Tokenizer

EOS = 1
BEGIN, END = 2, 3
"""Marks around a thought: two special tokens that the tests need for nothing else."""

KEYS = ("a", "name", 'q"uote', "ü")


@cache
def tokenizer_of() -> Tokenizer:
    return Tokenizer(tokenizers.byte_level(), eos_ids=frozenset({EOS}))


@cache
def decoder_of() -> TransformersDecoder:
    return TransformersDecoder(build(lambda: tiny_llama(tokenizer_of().size)))


@cache
def ending() -> dict[int, float]:
    """A bias towards what ends a JSON text: left alone, random weights hardly ever close a string."""
    closers = [tokenizer_of().encode(text, special=False) for text in ('"', "}", "]", ",", ":")]
    return {ids[0]: 8.0 for ids in closers} | {EOS: 8.0}


def open_driver(*, lagged: bool = False, rows: int = 64, room: int = 1 << 24) -> Driver:
    site = Site(
        LaggedCpu() if lagged else Device(), SiteSettings(max_rows=rows, cache_bytes=room, superpage=1 << 16, block=16)
    )
    decoder = decoder_of()
    grammars = GrammarStage(Grammars(tokenizer_of(), decoder.shape.vocabulary), site)
    return Driver(Loop(site, {"m": GenerationProgram(TokenStage("decode", decoder, site), "m", grammars)}))


def make_work(grammar: str | None, seed: int = 0, *, n: int = 1, tokens: int = 120, **options: Any) -> GenerateWork:
    sampling = options.pop("sampling", Sampling(temperature=0.7, logit_bias=ending()))
    guidance = options.pop("guidance", None) or (Guidance(grammar=grammar) if grammar else None)
    return GenerateWork(
        prompts=[tokenizer_of().encode("Tell me.", special=False)],
        max_tokens=[tokens],
        seeds=[seed + j for j in range(n)],
        n=n,
        sampling=sampling,
        stop_token_ids=[EOS],
        guidance=guidance,
        **options,
    )


def read(driver: Driver, job: str, branch: int = 0) -> str:
    return tokenizer_of().decode(driver.tokens(job, branch))


# ---- random schemas ----

ranges = st.tuples(st.integers(-50, 50), st.integers(0, 99))
values = st.lists(st.one_of(st.text(max_size=6), st.integers(0, 99), st.none()), min_size=1, max_size=4)
patterns = st.sampled_from([r"^[a-c]{1,3}$", r"^\d{2}-\d{2}$", "^(x|yz)+$"])
scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    ranges.map(lambda range: {"type": "integer", "minimum": range[0], "maximum": sum(range)}),
    st.just({"type": "number", "minimum": 0, "maximum": 10}),
    st.integers(0, 12).map(lambda longest: {"type": "string", "maxLength": longest}),
    patterns.map(lambda pattern: {"type": "string", "pattern": pattern}),
    values.map(lambda choices: {"enum": choices}),
    st.sampled_from([{"const": "fixed"}, {"const": 7}, {"type": "string", "format": "date"}]),
)


def compound(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    keys = st.lists(st.sampled_from(KEYS), unique=True, max_size=3)
    objects = keys.flatmap(
        lambda names: st.builds(
            lambda values, needed, closed: {
                "type": "object",
                "properties": dict(zip(names, values)),
                "required": [name for name, need in zip(names, needed) if need],
                **({"additionalProperties": False} if closed else {}),
            },
            st.lists(inner, min_size=len(names), max_size=len(names)),
            st.lists(st.booleans(), min_size=len(names), max_size=len(names)),
            st.booleans(),
        )
    )
    arrays = st.builds(
        lambda items, low, more: {"type": "array", "items": items, "minItems": low, "maxItems": low + more},
        inner,
        st.integers(0, 2),
        st.integers(0, 2),
    )
    unions = st.builds(lambda options: {"anyOf": options}, st.lists(inner, min_size=1, max_size=3))
    return st.one_of(objects, arrays, unions)


TREE = {
    "$ref": "#/$defs/tree",
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/tree"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}

schemas = st.one_of(st.recursive(scalars, compound, max_leaves=6), st.just(TREE))


mixes = {
    "many": st.lists(schemas, min_size=20, max_size=20),
    "lagged": st.booleans(),
    "rows": st.sampled_from([3, 64]),
    "tight": st.booleans(),
    "seed": st.integers(0, 1 << 20),
}


@settings(max_examples=2, deadline=None)
@given(**mixes)
def test_finished_answers_validate(**mix: Any) -> None:
    """40 random schemas."""
    check_mix(**mix)


@pytest.mark.slow
@settings(max_examples=10, deadline=None)
@given(**mixes)
def test_every_finished_answer_validates(**mix: Any) -> None:
    """200 random schemas."""
    check_mix(**mix)


def check_mix(many: list[dict[str, Any]], lagged: bool, rows: int, tight: bool, seed: int) -> None:
    """In batches of their own kind and with free rows, preempted, ahead of the host."""
    driver = open_driver(lagged=lagged, rows=rows, room=(1 << 16) * (12 if tight else 200))
    for i, schema in enumerate(many):
        driver.submit(f"{i}", "m", "chat", make_work(write_grammar(Format("schema", schema)), seed + i, logprobs=1))
    driver.submit("free", "m", "chat", make_work(None, seed))
    driver.finish()
    finished = 0
    for i, schema in enumerate(many):
        assert driver.error(f"{i}") is None
        if driver.reasons(f"{i}")[0] == "stop":
            finished += 1
            jsonschema.validate(json.loads(read(driver, f"{i}")), schema, format_checker=jsonschema.FormatChecker())
            chosen = driver.logprobs(f"{i}")
            assert all(-1e9 < value <= 1e-5 for value in chosen)
    assert finished > len(many) // 2
    assert len(driver.tokens("free")) > 0


@pytest.mark.parametrize("lagged", [False, True])
def test_a_formatted_neighbour_changes_nothing_for_a_free_row(lagged: bool) -> None:
    """Joining launches and others draw the same."""
    alone = open_driver(lagged=lagged)
    alone.submit("free", "m", "chat", make_work(None, 5, tokens=30))
    alone.finish()
    mixed = open_driver(lagged=lagged)
    mixed.submit("formatted", "m", "chat", make_work(write_grammar(Format("schema", TREE)), 6))
    mixed.submit("free", "m", "chat", make_work(None, 5, tokens=30))
    mixed.finish()
    assert mixed.tokens("free") == alone.tokens("free")


@pytest.mark.parametrize("lagged", [False, True])
def test_launch_ahead_changes_no_token(lagged: bool) -> None:
    driver = open_driver(lagged=lagged)
    grammar = write_grammar(Format("regex", "[a-z ]{5,40}[.]"))
    driver.submit("a", "m", "chat", make_work(grammar, 3, n=3))
    driver.finish()
    plain = open_driver()
    for branch in range(3):
        plain.submit(f"{branch}", "m", "chat", make_work(grammar, 3 + branch))
        plain.finish()
        assert plain.tokens(f"{branch}") == driver.tokens("a", branch), "choice j draws like n=1 with seed + j"


def test_an_answer_ends_when_its_format_does() -> None:
    """Even when the model's own end is ignored."""
    driver = open_driver()
    work = make_work(write_grammar(Format("choice", ["yes", "no"])), sampling=Sampling(temperature=0.0))
    work.stop_token_ids = []
    driver.submit("a", "m", "chat", work)
    driver.finish()
    assert driver.reasons("a") == {0: "stop"}
    assert read(driver, "a") in ("yes", "no")


def test_a_format_that_is_none_fails_its_job_alone() -> None:
    driver = open_driver()
    driver.submit("bad", "m", "chat", make_work('{"grammars": [{"lark_grammar": "start: ("}]}'))
    driver.submit("good", "m", "chat", make_work(write_grammar(Format("choice", ["yes"]))))
    driver.finish()
    error = driver.error("bad")
    assert error is not None and error.status == 400
    assert read(driver, "good") == "yes"


@pytest.mark.parametrize("lagged", [False, True])
@pytest.mark.parametrize("budget", [None, 0, 4])
def test_a_thought_is_free_and_bounded_and_the_answer_keeps_its_format(lagged: bool, budget: int | None) -> None:
    driver = open_driver(lagged=lagged)
    grammar = write_grammar(Format("schema", {"type": "integer", "minimum": 0, "maximum": 9}))
    thought = Thought(begin=BEGIN, end=END, inside=True, budget=budget)
    bias = {END: 6.0}
    for seed in range(8):
        guidance = Guidance(grammar=grammar, thought=thought)
        sampling = Sampling(temperature=1.0, logit_bias=bias)
        driver.submit(f"{seed}", "m", "chat", make_work(None, seed, guidance=guidance, sampling=sampling, tokens=200))
    driver.finish()
    for seed in range(8):
        tokens = driver.tokens(f"{seed}")
        assert driver.reasons(f"{seed}") == {0: "stop"}
        length = tokens.index(END)
        assert budget is None or length <= budget
        assert 0 <= int(tokenizer_of().decode(tokens[length + 1 :])) <= 9


def test_cancelling_in_the_middle_of_a_format_leaves_nothing_behind() -> None:
    random = Random(0)
    driver = open_driver(lagged=True)
    for i in range(12):
        driver.submit(f"{i}", "m", "chat", make_work(write_grammar(Format("schema", TREE)), i, n=2))
        driver.run(random.randrange(1, 6))
        if i % 2:
            driver.cancel(f"{i}", branch=random.choice([None, 0, 1]))
    driver.finish()
