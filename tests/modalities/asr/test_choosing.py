"""Rules and choice in one kernel against the rules one after the other; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/modalities/asr/test_choosing.py   (without a card)
"""

from __future__ import annotations

import os

import pytest
import torch

from polymux.core.batch.drawing import Drawer
from polymux.core.compute.rules import Suppress, SuppressFirst
from polymux.core.engine.site import Site
from polymux.modalities.asr.rules import Timestamps

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")

if not INTERPRETED and DEVICE.type == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.modalities.asr.choosing import WhisperChoice  # noqa: E402

END, NO_TIMESTAMPS, FIRST, VOCABULARY = 70, 79, 80, 113
SUPPRESSED, AT_FIRST = (1, 2, 71, 72), (5, END)


@pytest.mark.parametrize("latest", [None, 9])
def test_it_chooses_as_the_rules_do(latest: int | None) -> None:
    """Whole texts of random logits: each token depends on those before it. Text and timestamps win by turns."""
    rules = (SuppressFirst(AT_FIRST), Suppress(SUPPRESSED), Timestamps(FIRST, END, NO_TIMESTAMPS, latest))
    choose = WhisperChoice(VOCABULARY, AT_FIRST, SUPPRESSED, FIRST, END, NO_TIMESTAMPS, latest, DEVICE)
    drawer = Drawer(VOCABULARY, Site())
    rows, generator = 6, torch.Generator().manual_seed(0)
    for slot in range(rows):
        drawer._rules.admit(slot, rules, [])
    slots = torch.tensor([3, 0, 5, 1, 4, 2])
    states = [state.clone().to(DEVICE) for state in drawer._rules.find(rules)]
    seen: set[bool] = set()
    for step in range(24):
        logits = 3 * torch.randn(rows, VOCABULARY, generator=generator)
        logits[:, FIRST:] += 4.0 * (step % 3 == 0) - 1.0
        if step == 7:
            logits[2, 40] = float("nan")
        tokens, finite, logprobs = drawer.choose(logits, slots, rules)
        found = choose(logits.to(DEVICE), slots.to(DEVICE), states)
        sound = finite.nonzero()[:, 0]
        assert found[1].tolist() == finite.tolist()
        assert found[0][sound].tolist() == tokens[sound].tolist()
        torch.testing.assert_close(found[2][sound].cpu(), logprobs[sound], rtol=1e-5, atol=1e-5)
        seen |= {token >= FIRST for token in tokens.tolist()}
        if len(sound) < rows:  # a row that fails has no state worth comparing
            for ours, theirs in zip(states, drawer._rules.find(rules)):
                theirs[slots[2]] = ours[slots[2]].cpu()
        for ours, theirs in zip(states, drawer._rules.find(rules)):
            assert ours[:rows].tolist() == theirs[:rows].tolist()
    assert seen == {True, False}
