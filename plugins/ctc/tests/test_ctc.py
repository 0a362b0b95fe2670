"""The recogniser spells what transformers' own model and decoder spell, word by word, however long the recording."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from polymux_ctc.audio import LONGEST, find_cut, read_stretches
from polymux_ctc.example import PIECES, make_recording, write_model
from polymux_ctc.presenter import Spelling
from polymux_ctc.work import RATE, Spelled, Word, Words
from transformers import Wav2Vec2CTCTokenizer, Wav2Vec2FeatureExtractor, Wav2Vec2ForCTC

from polymux.core.plugins import load_plugins
from polymux.core.tasks import Heard, Segment, TextDelta, Transcribe
from polymux.core.testing.conformance import run_checks
from polymux.core.testing.conformance.bench import Bench

CERTAIN = 1e-3
"""Between the best letter and the next, where rounding must not decide."""

SPELLING = Spelling(dict(enumerate(PIECES)), 0, "|")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    plugins = load_plugins()
    (example,) = plugins.examples("ctc")
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    return Bench(plugins, example, folder)


def spell(letters: str) -> Spelled:
    ids = [0 if letter == "_" else PIECES.index(letter) for letter in letters]
    return Spelled(np.array(ids), np.log(np.full(len(ids), 0.5)), len(ids) * RATE // 10)


def test_runs_are_letters_and_blanks_are_none() -> None:
    assert [word.word for word in SPELLING.read(spell("hh_e_l_ll|_tt_o"), 0.0)] == ["hell", "to"]


def test_a_mark_inside_a_letter_does_not_double_it() -> None:
    ids = [PIECES.index(piece) for piece in ("t", "<s>", "t", "<pad>", "t", "</s>")]
    spelled = Spelled(np.array(ids), np.log(np.full(len(ids), 0.5)), len(ids) * RATE // 10)
    assert [word.word for word in SPELLING.read(spelled, 0.0)] == ["tt"]


def test_words_have_their_times() -> None:
    first, second = SPELLING.read(spell("_hi|||_a"), 10.0)
    assert (first.start, first.end) == (pytest.approx(10.1), pytest.approx(10.3))
    assert (second.start, second.end) == (pytest.approx(10.7), pytest.approx(10.8))
    assert first.confidence == pytest.approx(0.5)


def test_it_spells_as_transformers_does(bench: Bench, tmp_path: Path) -> None:
    model = Wav2Vec2ForCTC.from_pretrained(bench.folder).eval()
    extract = Wav2Vec2FeatureExtractor(do_normalize=True)
    file = tmp_path / "speech.wav"
    for seed in range(9, 40):  # random weights come near to ties, which sums in another order may break the other way
        file.write_bytes(make_recording(2.0, seed))
        samples = np.concatenate(list(read_stretches(str(file))))
        with torch.inference_mode():
            logits = model(extract(samples, sampling_rate=RATE, return_tensors="pt").input_values).logits[0]
        first, second = logits.topk(2).values.unbind(-1)
        if (first - second).min() > CERTAIN:
            break
    else:
        pytest.fail("no recording whose letters are all certain")
    ids = logits.argmax(-1)
    # the tokenizer can leave out marks only together with blanks, and those keep double letters apart
    ids = ids[~torch.isin(ids, torch.tensor([PIECES.index(mark) for mark in ("<s>", "</s>", "<unk>")]))]
    wanted = Wav2Vec2CTCTokenizer(str(bench.folder / "vocab.json"), do_lower_case=False).decode(ids)
    (answers,) = bench.answer([("words", Words(str(file)))])
    assert " ".join(answer.word for answer in answers if isinstance(answer, Word)) == wanted


def test_a_transcript_is_its_segments(bench: Bench) -> None:
    (answers,) = bench.answer([("transcribe", Transcribe(audio=make_recording(1.5, 2), language="en"))])
    text = "".join(answer.text for answer in answers if isinstance(answer, TextDelta))
    assert text == "".join(answer.text for answer in answers if isinstance(answer, Segment))
    (heard,) = (answer for answer in answers if isinstance(answer, Heard))
    assert (heard.language, heard.seconds) == ("en", pytest.approx(1.5, abs=0.01))


def test_long_recordings_are_cut_where_it_is_quiet() -> None:
    samples = np.random.default_rng(0).normal(0, 0.3, LONGEST).astype(np.float32)
    samples[LONGEST - 2 * RATE : LONGEST - 2 * RATE + 2000] = 0
    assert LONGEST - 2 * RATE <= find_cut(samples) <= LONGEST - 2 * RATE + 2000
    stretches = list(read_stretches(make_recording(45.0, 1)))
    assert sum(map(len, stretches)) == 45 * RATE
    assert len(stretches) >= 3 and max(map(len, stretches)) <= LONGEST


@pytest.mark.slow
def test_it_passes_the_check() -> None:
    assert run_checks("ctc") == 0
