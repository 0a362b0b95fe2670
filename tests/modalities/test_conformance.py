"""Our own modalities owe what a stranger's plugin owes, and so do core and the gateway."""

from __future__ import annotations

import pytest

from polymux.core.testing.conformance import run_checks

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("name", ["llm", "vision", "asr", "tts", "diffusion", "core", "gateway"])
def test_it_passes_the_check(name: str) -> None:
    assert run_checks(name) == 0
