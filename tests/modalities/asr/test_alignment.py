"""What tokens are heard at is what transformers' own attention says, in windows of any length."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from polymux.core.cache.blocks import view_blocks
from polymux.core.engine.site import Site, SiteSettings
from polymux.modalities.asr.alignment import Aligner, Reading, average, choose_heads
from polymux.modalities.asr.features import LogMel
from polymux.modalities.asr.whisper import Excerpt, split_whisper

HEADS = [(0, 1), (1, 0)]


def shorten(encoder, frames):
    """transformers' encoder for windows of `frames` positions."""
    short = copy.copy(encoder)
    short._modules = dict(encoder._modules)
    short.config = copy.copy(encoder.config)
    short.config.max_source_positions = frames
    weight = encoder.embed_positions.weight[:frames]
    short.embed_positions = torch.nn.Embedding(frames, weight.shape[1], _weight=weight, _freeze=True)
    return short


@pytest.mark.parametrize("frames", [50, 25, 10])
def test_attention_is_that_of_transformers(whisper, sound, frames):
    eager = copy.deepcopy(whisper)
    eager.set_attn_implementation("eager")
    encoder, decoder = split_whisper(copy.deepcopy(whisper))
    site = Site(settings=SiteSettings(max_rows=6, block=4, cache_bytes=1 << 24, superpage=1 << 18))
    slabs = view_blocks(site.arena, encoder.slab)
    recordings = [sound(seed, seconds=frames / 50) for seed in (1, 2)]
    texts = [[81, 82, 86, 89, 3, 4, 7], [81, 83, 86, 89, 9]]
    aligner = Aligner(decoder, HEADS, site)
    with torch.inference_mode():
        encoder.forward([Excerpt(samples, frames) for samples in recordings], [slabs[3], slabs[1]])
        readings = [Reading(text, block, frames, frames - 2) for text, block in zip(texts, (3, 1))]
        found = aligner.forward(readings, [])
        for samples, text, matrix in zip(recordings, texts, found):
            short = shorten(eager.model.encoder, frames)
            hidden = short(LogMel(80)(torch.from_numpy(samples)[None])).last_hidden_state
            output = eager.model.decoder(
                input_ids=torch.tensor([text]), encoder_hidden_states=hidden, output_attentions=True
            )
            weights = torch.stack([output.cross_attentions[layer][0, head] for layer, head in HEADS])
            assert matrix.shape == (len(text), frames - 2)
            assert torch.allclose(matrix, average(weights, frames - 2), atol=2e-3)


def test_readings_of_other_windows_wait_for_a_launch_of_their_own(whisper):
    _, decoder = split_whisper(copy.deepcopy(whisper))
    aligner = Aligner(decoder, HEADS, Site(settings=SiteSettings(cache_bytes=1 << 24, superpage=1 << 18)))
    assert aligner.compatible(Reading([1], 0, 25, 25), Reading([1, 2], 1, 25, 9))
    assert not aligner.compatible(Reading([1], 0, 25, 25), Reading([1], 1, 50, 25))


def test_one_token_and_a_moment_of_sound_have_an_attention():
    assert np.isfinite(average(torch.rand(2, 1, 50), 1).numpy()).all()


def test_heads_that_a_model_does_not_name():
    assert choose_heads([[1, 2]], 4, 2) == [(1, 2)]
    assert choose_heads(None, 4, 2) == [(2, 0), (2, 1), (3, 0), (3, 1)]
