"""One window after another gives what transformers' own long-form loop gives, whatever else runs."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymux.core.compute.device import Device, LaggedCpu
from polymux.core.tasks import Heard, Reached
from polymux.modalities.asr.features import LogMel
from polymux.modalities.asr.seek import LEAST, STAMP, find_rest, find_stride
from polymux.modalities.asr.work import AudioChunk, TranscribeWork, WindowText

FIRST = 90
WINDOW = 16_000
CONTEXT = 64
"""Published models name theirs as `max_length`, too."""


class LongForm:
    """transformers' `generate` over a whole recording, with the features of each window computed from its samples:
    the loudest value of a recording that still arrives is not known, so ours are normalised per window."""

    def __init__(self, model: torch.nn.Module, tokens) -> None:
        self.model = copy.deepcopy(model)
        self.features = LogMel(80)
        config = self.model.generation_config
        config.is_multilingual = True
        config.lang_to_id = {f"<|{code}|>": id for code, id in tokens.languages.items()}
        config.task_to_id = {"transcribe": tokens.transcribe, "translate": tokens.translate}
        config.no_timestamps_token_id = tokens.no_timestamps
        config.prev_sot_token_id = tokens.previous
        config.decoder_start_token_id = tokens.start
        config.max_initial_timestamp_index = tokens.latest_start
        config.suppress_tokens = list(tokens.suppressed)
        config.begin_suppress_tokens = list(tokens.suppressed_first)
        config.max_length = CONTEXT

    def generate(self, samples: np.ndarray, language: str, task: str, *, remembers: bool) -> list[list[int]]:
        """Tokens of every segment."""

        def cut(input_features, seek, seek_num_frames, num_segment_frames, cur_bsz, batch_idx_map):
            start = int(seek[0]) * 160
            part = samples[start : start + WINDOW]
            return self.features(torch.from_numpy(np.pad(part, (0, WINDOW - len(part))))[None])

        self.model._get_input_segment = cut
        output = self.model.generate(
            torch.zeros(1, 80, len(samples) // 160),
            attention_mask=torch.ones(1, len(samples) // 160, dtype=torch.long),
            language=language,
            task=task,
            return_timestamps=True,
            return_segments=True,
            condition_on_prev_tokens=remembers,
            temperature=0.0,
        )
        return [segment["tokens"].tolist() for segment in output["segments"][0]]


@pytest.fixture(scope="module")
def long_form(whisper, tokens) -> LongForm:
    return LongForm(whisper, tokens)


def join(segments: list[list[int]]) -> list[int]:
    """Without the second timestamp of a pair that ended a window."""
    kept = [tokens[:-1] if len(tokens) > 1 and min(tokens[-2:]) >= FIRST else tokens for tokens in segments]
    return [token for tokens in kept for token in tokens]


@pytest.mark.parametrize("device", [Device, LaggedCpu])
@pytest.mark.parametrize("remembers", [False, True])
def test_the_tokens_and_timestamps_of_transformers_in_every_mix(device, remembers, drive, transcribe, sound, long_form):
    driver = drive(device)
    expected: dict[str, list[int]] = {}
    languages, tasks = ["en", "de", "fr"], ["transcribe", "translate"]
    for seed in range(6 if remembers else 5):
        samples = sound(seed, seconds=0.8 + 0.45 * seed)
        samples = samples[: len(samples) // 160 * 160]
        language, task = languages[seed % 3], tasks[seed % 2]
        expected[str(seed)] = join(long_form.generate(samples, language, task, remembers=remembers))
        transcribe(driver, str(seed), samples, task, language=language, seek=True, remembers=remembers)
        driver.run(steps=7 * seed)
    driver.finish()
    strides = set()
    for job, tokens in expected.items():
        windows = driver.outputs(job, "window", WindowText)
        assert [token for window in windows for token in window.tokens] == tokens, job
        strides |= {after.start - before.start for before, after in itertools.pairwise(windows)}
    assert strides - {WINDOW}, "every window was whole: no timestamp was followed"


def test_a_model_may_name_how_long_an_answer_is(drive, transcribe, sound, whisper, tokens):
    """Published models name their context; what was tuned may name less."""
    long_form = LongForm(whisper, tokens)
    long_form.model.generation_config.max_length = 12
    driver = drive()
    driver.loop.programs["whisper"].hearing.tokens = replace(tokens, longest=12)
    expected = {}
    for seed in (1, 7, 13):
        samples = sound(seed)
        expected[str(seed)] = join(long_form.generate(samples, "de", "translate", remembers=False))
        long_form.model.generation_config.max_length = 12  # transformers adds the prompt's length to it in place
        transcribe(driver, str(seed), samples, "translate", language="de", seek=True)
    driver.finish()
    for job, tokens in expected.items():
        assert [token for window in driver.outputs(job, "window", WindowText) for token in window.tokens] == tokens
    assert 12 in map(len, expected.values()), "no answer was as long"


def test_windows_begin_where_timestamps_end(drive, sound):
    """In the recording's own samples, however it arrives; and what is reached is told."""
    samples = sound(3, seconds=3.0)
    found = []
    for step in (len(samples), 5_003):
        driver = drive()
        driver.submit("one", "whisper", "transcribe", TranscribeWork(language="en", seek=True))
        for start in range(0, len(samples), step):
            driver.post("one", AudioChunk(samples[start : start + step], last=start + step >= len(samples)))
            driver.run(steps=3)
        driver.finish()
        found.append([(window.start, window.tokens) for window in driver.outputs("one", "window", WindowText)])
        reached = [each.seconds for each in driver.outputs("one", "reached", Reached)]
        assert reached == sorted(reached) and reached[-1] == 3.0
        assert driver.outputs("one", "heard", Heard) == [Heard("en", 3.0)]
    assert found[0] == found[1]
    assert all(start % STAMP == 0 for start, _ in found[0])


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5) | st.integers(FIRST, FIRST + 50), max_size=20), st.integers(1, WINDOW))
def test_every_stride_goes_on(tokens, count):
    """A loop that stands still would never end."""
    stride = find_stride(tokens, FIRST, count)
    assert 0 < stride.samples <= count
    assert stride.tokens == tokens[: len(stride.tokens)]


def test_a_text_that_was_cut_off_is_heard_again():
    tokens = [FIRST, 1, 2, FIRST + 30, FIRST + 30, 3, 4]
    assert find_stride(tokens, FIRST, WINDOW).tokens == [FIRST, 1, 2, FIRST + 30]
    assert find_stride(tokens, FIRST, WINDOW).samples == 30 * STAMP
    closed = [FIRST, 1, FIRST + 10, FIRST + 10, 2, FIRST + 20]
    assert find_stride(closed, FIRST, WINDOW).samples == WINDOW
    assert find_stride([FIRST, 1, 2], FIRST, WINDOW).samples == WINDOW


def test_a_window_that_says_more_follows_is_heard_again_from_there() -> None:
    """A pair at the end: four seconds of speech behind it were lost in silence."""
    count, place = 30 * 16_000, round(26 / 0.02)
    stride = find_rest([FIRST, 1, 2, FIRST + place, FIRST + place], FIRST, count)
    assert stride is not None
    assert stride.tokens == [FIRST, 1, 2, FIRST + place]
    assert stride.samples == 26 * 16_000
    assert find_rest([FIRST, 1, 2, FIRST + place], FIRST, count) is None  # nothing follows
    assert find_rest([FIRST, 1, FIRST + 9, FIRST + 9, 2, FIRST + place], FIRST, count) is None
    nearly = round(29.5 / 0.02)
    assert find_rest([FIRST, 1, 2, FIRST + nearly, FIRST + nearly], FIRST, count) is None  # no room for a word
    assert find_rest([FIRST, FIRST], FIRST, count) is None  # it would not end
    assert find_rest([], FIRST, LEAST) is None
