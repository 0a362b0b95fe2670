"""Windows of codec frames sound like that part of the whole, whatever their length and company."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EncodecConfig, EncodecModel

from polymux.core.errors import ModelError
from polymux.core.testing.voices import CODEBOOKS, CODES
from polymux.modalities.tts.codecs import Codec, make_codec
from polymux.modalities.tts.field import Convolution, find_halo, find_span

FRAMES = 60


def prepare(originals: dict[str, Any], name: str) -> tuple[Codec, list[list[int]], torch.Tensor]:
    """A codec, codes for it, and what transformers makes of all of them."""
    model = originals["csm"].codec_model if name == "mimi" else originals["dac"]
    count = CODEBOOKS if name == "mimi" else 3
    codes = np.random.default_rng(0).integers(0, CODES, (FRAMES, count)).tolist()
    with torch.no_grad():
        decoded = model.decode(audio_codes=torch.tensor(codes).T[None]).audio_values
    return make_codec(copy.deepcopy(model)), codes, decoded.flatten()


@pytest.mark.parametrize("count", [1, 2, 7, 25, 60])
@pytest.mark.parametrize("name", ["mimi", "dac"])
def test_windows_are_the_whole(originals: dict[str, Any], name: str, count: int) -> None:
    codec, codes, expected = prepare(originals, name)
    windows = [codec.window(codes, start, min(start + count, FRAMES)) for start in range(0, FRAMES, count)]
    with torch.no_grad():
        # Mimi takes windows of all lengths at once
        batches = [windows] if name == "mimi" else [[window] for window in windows]
        found = torch.cat([sound for batch in batches for sound in codec.forward(batch, [])])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["mimi", "dac"])
def test_too_little_context_would_be_noticed(originals: dict[str, Any], name: str) -> None:
    codec, codes, expected = prepare(originals, name)
    codec.left = 1
    with torch.no_grad():
        found = codec.forward([codec.window(codes, 30, 40)], [])[0]
    assert (found - expected[30 * codec.hop : 40 * codec.hop]).abs().max() > 1e-4


def test_ids_beyond_the_codebook_are_heard_as_its_last_code(originals: dict[str, Any]) -> None:
    codec, _, _ = prepare(originals, "mimi")
    with torch.no_grad():
        strange = codec.forward([codec.window([[CODES + 2] * CODEBOOKS], 0, 1)], [])[0]
        last = codec.forward([codec.window([[CODES - 1] * CODEBOOKS], 0, 1)], [])[0]
    assert torch.equal(strange, last)


def test_windows_of_other_lengths_do_not_share_a_pass_where_it_would_be_heard(originals: dict[str, Any]) -> None:
    codec, codes, _ = prepare(originals, "dac")
    first, inner, other = (codec.window(codes, start, end) for start, end in ((0, 2), (30, 32), (31, 33)))
    assert codec.compatible(inner, other)
    assert not codec.compatible(first, inner)


def test_a_codec_without_an_end_to_its_memory_is_refused() -> None:
    with pytest.raises(ModelError, match="mimi or dac"):
        make_codec(EncodecModel(EncodecConfig(num_filters=2, hidden_size=8, num_lstm_layers=1)))


def test_reach_of_a_stack() -> None:
    """By hand: a centred kernel of 3, then a transposed one of 4 with stride 2, one cut from its start."""
    stack = [Convolution(3, before=1), Convolution(4, 2, before=1, transposed=True)]
    assert find_span(stack, 0, 1) == (-2, 2)
    assert find_halo(stack, 2) == (2, 2)
