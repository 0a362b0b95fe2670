"""Windows of codec frames sound like that part of the whole, whatever their length and company."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import EncodecConfig, EncodecModel

from polymux.core.errors import ModelError
from polymux.core.testing.media import compare_spectra
from polymux.core.testing.voices import CODEBOOKS, CODES, SNAC, tiny_snac
from polymux.modalities.tts.codecs import Codec, make_codec
from polymux.modalities.tts.field import Convolution, find_halo, find_span
from polymux.modalities.tts.snac import draw_normal, make_snac, order_lanes, steady_noise

FRAMES = 60


@cache
def snac() -> Any:
    pytest.importorskip("snac", reason="pip install 'polymux[snac]'")
    torch.manual_seed(2)
    return tiny_snac().eval()


def prepare(originals: dict[str, Any], name: str) -> tuple[Codec, np.ndarray, torch.Tensor]:
    """A codec, codes for it, and what its own package makes of all of them."""
    count = {"mimi": CODEBOOKS, "dac": 3, "snac": 7}[name]
    codes = np.random.default_rng(0).integers(0, CODES, (FRAMES, count))
    if name == "snac":
        codec = make_snac(copy.deepcopy(snac()))
        frames = torch.from_numpy(codes)[None]
        levels = [frames[:, :, lanes].flatten(1) for lanes in ([0], [1, 4], [2, 3, 5, 6])]
        original = copy.deepcopy(snac())
        steady_noise(original.decoder, original.vq_strides[0])
        with torch.no_grad():
            return codec, codes, original.decode(levels).flatten()
    model = originals["csm"].codec_model if name == "mimi" else originals["dac"]
    with torch.no_grad():
        decoded = model.decode(audio_codes=torch.from_numpy(codes).T[None]).audio_values
    return make_codec(copy.deepcopy(model)), codes, decoded.flatten()


CODEC_NAMES = ["mimi", "dac", "snac"]


@pytest.mark.parametrize("count", [1, 2, 7, 25, 60])
@pytest.mark.parametrize("name", CODEC_NAMES)
def test_windows_are_the_whole(originals: dict[str, Any], name: str, count: int) -> None:
    codec, codes, expected = prepare(originals, name)
    windows = [codec.window(codes, start, min(start + count, FRAMES), count) for start in range(0, FRAMES, count)]
    with torch.no_grad():
        # Mimi takes windows of all lengths at once
        batches = [windows] if name == "mimi" else [[window] for window in windows]
        found = torch.cat([sound for batch in batches for sound in codec.forward(batch, [])])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_too_little_context_would_be_noticed(originals: dict[str, Any], name: str) -> None:
    codec, codes, expected = prepare(originals, name)
    codec.left = 0 if name == "snac" else 1
    with torch.no_grad():
        found = codec.forward([codec.window(codes, 30, 40, 10)], [])[0]
    assert (found - expected[30 * codec.hop : 40 * codec.hop]).abs().max() > 1e-4


@pytest.mark.parametrize("name", CODEC_NAMES)
def test_nothing_clicks_where_windows_meet(originals: dict[str, Any], name: str) -> None:
    """The spectrum at every joint is that of the whole sound; with too little context it is not."""
    codec, codes, expected = prepare(originals, name)
    joints = range(5 * codec.hop, FRAMES * codec.hop, 5 * codec.hop)

    def join() -> np.ndarray:
        windows = [codec.window(codes, start, start + 5, 5) for start in range(0, FRAMES, 5)]
        with torch.no_grad():
            return torch.cat([codec.forward([window], [])[0] for window in windows]).numpy()

    assert compare_spectra(join(), expected.numpy(), joints) < -80
    codec.left = 0
    assert compare_spectra(join(), expected.numpy(), joints) > -60


def test_ids_beyond_the_codebook_are_heard_as_its_last_code(originals: dict[str, Any]) -> None:
    codec, _, _ = prepare(originals, "mimi")
    with torch.no_grad():
        strange = codec.forward([codec.window(np.full((1, CODEBOOKS), CODES + 2), 0, 1, 1)], [])[0]
        last = codec.forward([codec.window(np.full((1, CODEBOOKS), CODES - 1), 0, 1, 1)], [])[0]
    assert torch.equal(strange, last)


def test_windows_of_other_lengths_do_not_share_a_pass_where_it_would_be_heard(originals: dict[str, Any]) -> None:
    codec, codes, _ = prepare(originals, "dac")
    first, inner, other = (codec.window(codes, start, end, 2) for start, end in ((0, 2), (30, 32), (31, 33)))
    assert codec.compatible(inner, other)
    assert not codec.compatible(first, inner)


@pytest.mark.parametrize("name", ["dac", "snac"])
def test_the_last_windows_of_all_sounds_share_a_pass(originals: dict[str, Any], name: str) -> None:
    """However short: what they lack in length they get in context."""
    codec, codes, expected = prepare(originals, name)
    windows = [codec.window(codes[:end], 50, end, 8) for end in (51, 54, 58)]
    inner = codec.window(codes, 40, 48, 8)
    assert all(codec.compatible(inner, window) for window in windows)
    with torch.no_grad():
        found = codec.forward([inner, *windows], [])
    assert [len(sound) for sound in found] == [count * codec.hop for count in (8, 1, 4, 8)]
    torch.testing.assert_close(found[0], expected[40 * codec.hop : 48 * codec.hop], atol=1e-5, rtol=0)


def test_noise_of_a_codec_is_noise_and_the_places_own() -> None:
    places = torch.arange(20_000)
    numbers = draw_normal(3, places)
    assert numbers.mean().abs() < 0.03
    assert (numbers.std() - 1).abs() < 0.03
    assert torch.equal(draw_normal(3, places[500:600]), numbers[500:600])
    assert not torch.equal(draw_normal(4, places), numbers)


def test_the_walk_through_the_tree_of_codes() -> None:
    """As Orpheus writes its frames."""
    assert order_lanes(3) == [[0], [1, 4], [2, 3, 5, 6]]


def test_a_snac_that_cannot_be_cut_is_refused() -> None:
    package = pytest.importorskip("snac")
    with pytest.raises(ModelError, match="local attention"):
        make_snac(package.SNAC(**{**SNAC, "attn_window_size": 2}))
    with pytest.raises(ModelError, match="strides"):
        make_snac(package.SNAC(**{**SNAC, "vq_strides": [3, 1]}))


def test_a_codec_without_an_end_to_its_memory_is_refused() -> None:
    with pytest.raises(ModelError, match="mimi, dac or snac"):
        make_codec(EncodecModel(EncodecConfig(num_filters=2, hidden_size=8, num_lstm_layers=1)))


def test_reach_of_a_stack() -> None:
    """By hand: a centred kernel of 3, then a transposed one of 4 with stride 2, one cut from its start."""
    stack = [Convolution(3, before=1), Convolution(4, 2, before=1, transposed=True)]
    assert find_span(stack, 0, 1) == (-2, 2)
    assert find_halo(stack, 2) == (2, 2)
