"""The timestamp rules are those of transformers, row by row, at every step, for any history."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor

from polymux.modalities.asr.rules import Timestamps

FIRST, END, NONE = 20, 10, 19
"""Text is 0 to 9, then special tokens, then timestamps from 20 to 29."""


@pytest.mark.parametrize("latest", [None, 3])
@pytest.mark.parametrize("scale", [1.0, 6.0], ids=["flat logits", "sharp logits"])
def test_equals_transformers(latest, scale):
    torch.manual_seed(0)
    rule = Timestamps(FIRST, END, NONE, latest)
    theirs = WhisperTimeStampLogitsProcessor(
        SimpleNamespace(
            no_timestamps_token_id=NONE, eos_token_id=END, bos_token_id=END, max_initial_timestamp_index=latest
        ),
        begin_index=2,
    )
    rows = 200
    histories = torch.full((rows, 2), 11)
    states = torch.tensor([rule.begin()] * rows)
    for _ in range(8):
        logits = torch.randn(rows, 30) * scale
        ours = rule.apply(logits, states)
        torch.testing.assert_close(ours, theirs(histories, logits))
        tokens = torch.multinomial(ours.softmax(-1).nan_to_num(1 / 30), 1)[:, 0]
        histories = torch.cat([histories, tokens[:, None]], dim=1)
        states = rule.advance(states, tokens)


def test_replaying_a_history_gives_the_state_that_stepping_gave():
    rule = Timestamps(FIRST, END, NONE, None)
    assert rule.replay([22, 3, 4, 25, 25, 6], torch.device("cpu")).tolist() == [[6, 25, 25]]
