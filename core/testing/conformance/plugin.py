"""The pytest plugin behind the checks: which plugin is checked, with which examples, and that nothing leaves here.

Fixtures: `plugins` (all of them), `record` (the one that is checked), and for each of its examples `bench`, with
which its jobs are run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from polymux.core.plugins import Example, Plugin, Plugins, load_plugins
from polymux.core.testing.conformance.seal import Seal

if TYPE_CHECKING:
    from polymux.core.testing.conformance.bench import Bench


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("polymux")
    group.addoption("--polymux-plugin", help="the name of the plugin to check")
    group.addoption("--polymux-dir", action="append", default=[], help="a folder with more plugins")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[PLUGINS] = plugins = load_plugins([Path(folder) for folder in config.getoption("--polymux-dir")])
    hooks = plugins.find(config.getoption("--polymux-plugin")).hooks
    config.stash[SEAL] = seal = Seal()
    seal.close(torch=any(hook in ENGINE_HOOKS for hook in hooks))


def pytest_unconfigure(config: pytest.Config) -> None:
    config.stash[SEAL].open()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for `bench` runs once for each example of the plugin."""
    if "bench" in metafunc.fixturenames:
        found = own_examples(metafunc.config)
        metafunc.parametrize(
            "bench", found, ids=[example.pipeline for example in found], indirect=True, scope="session"
        )


@pytest.fixture(scope="session")
def plugins(pytestconfig: pytest.Config) -> Plugins:
    return pytestconfig.stash[PLUGINS]


@pytest.fixture(scope="session")
def record(pytestconfig: pytest.Config, plugins: Plugins) -> Plugin:
    return plugins.find(pytestconfig.getoption("--polymux-plugin"))


@pytest.fixture(scope="session")
def folders(pytestconfig: pytest.Config) -> list[Path]:
    return [Path(folder) for folder in pytestconfig.getoption("--polymux-dir")]


@pytest.fixture(scope="session")
def seal(pytestconfig: pytest.Config) -> Seal:
    return pytestconfig.stash[SEAL]


@pytest.fixture(scope="session")
def bench(request: pytest.FixtureRequest, plugins: Plugins, benches: dict[int, Bench]) -> Bench:
    return benches[id(request.param)]


@pytest.fixture(scope="session")
def benches(
    pytestconfig: pytest.Config, plugins: Plugins, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Bench]]:
    """A bench for each example; every model is made once."""
    from polymux.core.testing.conformance.bench import Bench

    made: dict[int, Bench] = {}
    for example in own_examples(pytestconfig):
        folder = tmp_path_factory.mktemp("model")
        example.make(folder)
        made[id(example)] = Bench(plugins, example, folder)
    yield made


def own_examples(config: pytest.Config) -> list[Example]:
    return config.stash[PLUGINS].examples(config.getoption("--polymux-plugin"))


ENGINE_HOOKS = ("pipelines", "attention_backends", "quantizers", "step_caches")

SEAL: pytest.StashKey[Any] = pytest.StashKey()
PLUGINS: pytest.StashKey[Plugins] = pytest.StashKey()
