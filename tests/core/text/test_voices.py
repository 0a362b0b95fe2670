"""A voice's own names come first; OpenAI's names always speak; any other name is refused with what there is."""

from __future__ import annotations

import pytest

from polymux.core.errors import InvalidRequest
from polymux.core.text.voices import choose_voice


@pytest.mark.parametrize(
    ("name", "voice"),
    [(None, "heart"), ("alloy", "heart"), ("emma", "emma"), ("fable", "fable"), ("heart", "heart")],
)
def test_who_speaks(name: str | None, voice: str) -> None:
    assert choose_voice(name, ["heart", "emma", "fable"]) == voice


@pytest.mark.parametrize("name", ["", "Alloy", "nobody", "x" * 10_000])
def test_nobody_speaks_under_an_unknown_name(name: str) -> None:
    with pytest.raises(InvalidRequest, match="this model has: heart") as refused:
        choose_voice(name, ["heart"])
    assert refused.value.param == "voice"
    assert len(refused.value.message) < 300
