"""A CTC model's times of words: torchaudio's alignment, inside the sound, in order, never empty."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

from polymux.core.compute.device import LaggedCpu
from polymux.core.errors import ModelError
from polymux.modalities.asr.letters import Alphabet, align, spell_tokens, time_tokens
from polymux.modalities.asr.spelling import Speller
from polymux.modalities.asr.words import split_words, time_words
from polymux.modalities.asr.work import WindowText

PIECES = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ'"]
ALPHABET = Alphabet({letter: id for id, letter in enumerate(PIECES) if len(letter) == 1 and letter != "|"}, 0, 4)


class Letters:
    """A tokenizer whose tokens are few, again and again."""

    def __init__(self, *words: str) -> None:
        self.words = words or (" hello", " there", "'s", ",", " 2014", " né", ".", " a")

    def token_bytes(self, token: int) -> bytes:
        return self.words[token % len(self.words)].encode()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random wav2vec2 as transformers writes it: five milliseconds a frame."""
    torch.manual_seed(5)
    config = Wav2Vec2Config(
        vocab_size=len(PIECES),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=64,
        conv_dim=(16, 16, 16),
        conv_stride=(5, 4, 4),
        conv_kernel=(10, 4, 4),
        num_feat_extract_layers=3,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=4,
        pad_token_id=0,
    )
    folder = tmp_path_factory.mktemp("ctc")
    Wav2Vec2ForCTC(config).eval().save_pretrained(folder)
    (folder / "vocab.json").write_text(json.dumps({piece: id for id, piece in enumerate(PIECES)}))
    return folder


def torchaudio_spans(logprobs: np.ndarray, classes: list[int]) -> list[list[int]]:
    try:
        from torchaudio.functional import forced_align, merge_tokens
    except (ImportError, OSError) as error:
        pytest.skip(f"torchaudio does not load here: {error}")
    path, scores = forced_align(torch.from_numpy(logprobs)[None], torch.tensor([classes]), blank=0)
    return [[span.start, span.end] for span in merge_tokens(path[0], scores[0])]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", range(8))
def test_the_way_is_that_of_torchaudio(seed):
    random = np.random.default_rng(seed)
    classes = random.integers(1, 6, 1 + seed).tolist()
    logits = torch.from_numpy(random.normal(0, 2, (40, 6)).astype(np.float32))
    logprobs = logits.log_softmax(-1).numpy()
    assert align(logprobs, classes, 0).tolist() == torchaudio_spans(logprobs, classes)


def test_too_little_sound_for_a_text_has_no_way():
    assert align(np.zeros((2, 6)), [1, 1], 0) is None  # a blank must stand between equal letters
    assert align(np.zeros((3, 6)), [1, 1], 0).tolist() == [[0, 1], [2, 3]]
    assert align(np.zeros((3, 6)), [], 0) is None


def test_numbers_lie_between_their_neighbours_and_punctuation_nowhere():
    spelling = spell_tokens([0, 3, 4, 7], Letters(), ALPHABET)  # hello , 2014 a
    letters = [PIECES[id] for id in spelling.classes]
    assert "".join(letters) == "HELLO|A"
    spans = np.array([[2 * place, 2 * place + 1] for place in range(len(letters))])
    starts, ends = time_tokens(spelling, spans, 20.0)
    assert list(zip(starts, ends)) == [(0, 9), (9, 9), (9, 12), (12, 13)]
    assert [PIECES[id] for id in spell_tokens([5, 2], Letters(), ALPHABET).classes] == ["N", "E", "'", "S"]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 7), min_size=1, max_size=8), st.integers(0, 99), st.integers(20, 60))
def test_whatever_was_heard_times_rise_inside_the_sound(tokens, seed, frames):
    spelling = spell_tokens(tokens, Letters(), ALPHABET)
    logprobs = np.random.default_rng(seed).normal(-3, 2, (frames, len(PIECES)))
    spans = align(logprobs, spelling.classes, 0)
    if spans is None:
        return
    starts, ends = ([frame * 0.02 for frame in each] for each in time_tokens(spelling, spans, frames))
    seconds = frames * 0.02
    words = time_words(split_words(tokens, Letters(), "en"), starts, seconds, ends)
    edges = [edge for word in words for edge in (word.start, word.end)]
    assert all(word.start < word.end for word in words)
    assert edges == sorted(edges) and edges[0] >= 0 and edges[-1] <= seconds + 1e-9


def test_in_every_mix_a_window_has_the_times_of_its_own_letters(drive, transcribe, sound, folder):
    """Alone and among others, one word too; where no letter fits, attention's times stay."""

    def run(jobs):
        driver = drive(LaggedCpu, spell=lambda site: Speller.load(folder, Letters(" a", "b", ",", " 2"), site))
        for number in jobs:
            transcribe(driver, str(number), sound(number, 0.4 + 0.2 * (number % 3)), language="en", words=True)
            driver.run(steps=3 * number)
        driver.finish()
        return {str(number): driver.outputs(str(number), "window", WindowText)[0] for number in jobs}

    together = run(range(4))
    spelled = 0
    for number, window in together.items():
        alone = run([int(number)])[number]
        assert alone.tokens == window.tokens
        assert alone.bounds == pytest.approx(window.bounds) and alone.ends == pytest.approx(window.ends)
        count = sum(token < 90 for token in window.tokens)
        spelled += bool(window.ends)
        assert len(window.bounds) == (count + (not window.ends) if count else 0)
    assert spelled


def test_what_is_no_ctc_model_is_refused(tmp_path, drive):
    with pytest.raises(ModelError, match="no CTC model"):
        drive(spell=lambda site: Speller.load(tmp_path, Letters(), site))
