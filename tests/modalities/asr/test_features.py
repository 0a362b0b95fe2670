"""The spectrogram is the one that Whisper was trained on."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from polymux.modalities.asr.features import LogMel


@pytest.mark.parametrize("mels", [80, 128])
def test_equals_transformers(mels):
    random = np.random.default_rng(0)
    samples = random.normal(0, 0.1, (3, 480_000)).astype(np.float32)
    samples[1, 100_000:] = 0  # silence behind a short recording
    samples[2] *= 1e-4
    extract = WhisperFeatureExtractor(feature_size=mels)
    expected = extract(list(samples), sampling_rate=16_000, return_tensors="pt").input_features
    torch.testing.assert_close(LogMel(mels)(torch.from_numpy(samples)), expected, atol=1e-5, rtol=0)


def test_a_window_does_not_depend_on_its_neighbours():
    """The floor below the loudest value is each window's own."""
    loud, quiet = np.random.default_rng(1).normal(0, 1, (2, 16_000)).astype(np.float32)
    quiet *= 1e-3
    mel = LogMel(80)
    together = mel(torch.from_numpy(np.stack([loud, quiet])))
    torch.testing.assert_close(together[1:], mel(torch.from_numpy(quiet[None])))
