"""Words have times: rising, inside the recording, never empty; and they are what transformers' attention says."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.testing.tokenizers import byte_level
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.alignment import average
from polymux.modalities.asr.warping import warp
from polymux.modalities.asr.words import split_words, time_words
from polymux.modalities.asr.work import WindowText

TOKENIZER = Tokenizer(byte_level())


def walk(weights: np.ndarray) -> list[int]:
    """The textbook's loops."""
    rows, frames = weights.shape
    totals = np.full((rows + 1, frames + 1), np.inf)
    totals[0, 0] = 0
    for row, frame in np.ndindex(rows, frames):
        before = min(totals[row, frame], totals[row, frame + 1], totals[row + 1, frame])
        totals[row + 1, frame + 1] = before - weights[row, frame]
    row, frame, begins = rows, frames, [0] * rows
    while row > 1 or frame > 1:
        begins[row - 1] = frame - 1
        steps = [(row - 1, frame - 1), (row - 1, frame), (row, frame - 1)]
        row, frame = min(steps, key=lambda step: totals[step])
    begins[0] = 0
    return begins


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 9), st.integers(1, 30), st.integers(0, 2**32 - 1))
def test_the_way_through_is_the_cheapest(rows, frames, seed):
    weights = np.random.default_rng(seed).normal(0, 1, (rows, frames))
    assert warp(weights).tolist() == walk(weights)


def test_clear_attention_gives_its_times():
    weights = np.zeros((4, 20), np.float32)
    for row, (begin, end) in enumerate([(0, 5), (5, 9), (9, 15), (15, 20)]):
        weights[row, begin:end] = 1.0
    assert warp(weights).tolist() == [0, 5, 9, 15]
    assert warp(np.ones((1, 7), np.float32)).tolist() == [0]


@pytest.mark.parametrize(
    "text", [" Hello, world! It's (really) fine.", " a", "Grüße — ça va?", " 3.5 %", ' "Yes," he said']
)
def test_words_joined_are_the_text(text):
    tokens = TOKENIZER.encode(text)
    words = split_words(tokens, TOKENIZER, "en")
    assert "".join(word for word, _ in words) == text
    assert sum(count for _, count in words) == len(tokens)


def test_punctuation_belongs_to_its_word():
    words = [word for word, _ in split_words(TOKENIZER.encode(' Hello, "you" there!'), TOKENIZER, "en")]
    assert words == [" Hello,", ' "you"', " there!"]
    assert [word for word, _ in split_words(TOKENIZER.encode("日本。"), TOKENIZER, "ja")] == ["日", "本。"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 60)), min_size=1, max_size=30), st.floats(0.5, 30.0))
def test_whatever_the_attention_says_times_rise_inside_the_window(words, seconds):
    counts = [("word." if count == 3 else "word", count) for count, _ in words]
    steps = [step for count, step in words for _ in range(count)]
    bounds = np.concatenate([[0], np.cumsum(steps)]) * 0.02
    timed = time_words(counts, np.minimum(bounds, seconds).tolist(), seconds)
    floor = 0.0
    for word in timed:
        assert floor - 1e-9 <= word.start < word.end <= seconds + 1e-9
        floor = word.end


def expect_bounds(whisper, reference, samples: np.ndarray, prompt: list[int], words: list[int]) -> list[float]:
    """From transformers' eager attention: all heads of the upper half of the layers."""
    whisper.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            output = whisper(
                input_features=reference._features(samples),
                decoder_input_ids=torch.tensor([[*prompt, 89, *words, 80]]),
                output_attentions=True,
            )
    finally:
        whisper.set_attn_implementation("sdpa")
    heads = torch.cat([layer[0] for layer in output.cross_attentions[1:]])
    sounding = -(-len(samples) // 320)
    return [frame * 0.02 for frame in warp(average(heads, sounding)[len(prompt) : -1].numpy())]


@pytest.mark.parametrize("device", [Device, LaggedCpu])
def test_in_every_mix_words_are_where_transformers_attention_is(device, drive, transcribe, sound, reference, whisper):
    driver = drive(device)
    for seed in range(7):
        transcribe(driver, str(seed), sound(seed, seconds=0.3 + 0.1 * seed), language="en", words=seed != 6)
        driver.run(steps=2 * seed)
    driver.finish()
    timed = 0
    for seed in range(6):
        (window,) = driver.outputs(str(seed), "window", WindowText)
        words = [token for token in window.tokens if token < 90]
        samples = sound(seed, seconds=0.3 + 0.1 * seed)
        if not words:
            assert window.bounds == []
            continue
        timed += 1
        assert window.bounds == pytest.approx(expect_bounds(whisper, reference, samples, [81, 82, 86], words))
    assert timed
    assert driver.outputs("6", "window", WindowText)[0].bounds == []
