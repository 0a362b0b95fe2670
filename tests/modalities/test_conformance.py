"""Our own modalities owe what a stranger's plugin owes."""

from __future__ import annotations

import pytest

from polymux.core.testing.conformance import run_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["llm"])
def test_it_passes_the_check(name: str) -> None:
    assert run_checks(name) == 0
