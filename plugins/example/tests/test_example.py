"""The plugin invents names that were not in its list, streams them, and owes nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
from polymux_example.source import LISTS, learn
from polymux_example.work import Invent, Letters

from polymux.core.plugins import load_plugins
from polymux.core.testing.conformance import run_checks
from polymux.core.testing.conformance.bench import Bench


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    plugins = load_plugins()
    (example,) = plugins.examples("example")
    example.make(tmp_path)
    return Bench(plugins, example, tmp_path)


def read_names(answers: list[object]) -> list[str]:
    names: dict[int, str] = {}
    for answer in answers:
        if isinstance(answer, Letters):
            names[answer.index] = names.get(answer.index, "") + answer.text
    return [names[index] for index in sorted(names)]


def test_names_are_new_and_follow_the_seed(bench: Bench) -> None:
    (first,) = bench.answer([("invent", Invent(count=8, seed=3))])
    (other,) = bench.answer([("invent", Invent(count=8, seed=4))])
    names = read_names(first)
    assert len(names) == 8 and all(name.isalpha() for name in names)
    assert set(names) - set(LISTS["stars"].split())
    assert names != read_names(other)


def test_a_colder_model_stays_closer_to_its_list(bench: Bench) -> None:
    (cold,) = bench.answer([("invent", Invent(count=32, temperature=0.05))])
    (hot,) = bench.answer([("invent", Invent(count=32, temperature=4.0))])
    assert len(set(read_names(cold))) < len(set(read_names(hot)))


def test_the_model_is_plain_safetensors(tmp_path: Path) -> None:
    learn("flowers", tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.slow
def test_it_passes_the_check() -> None:
    assert run_checks("example") == 0
