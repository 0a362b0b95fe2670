"""Texts become pieces: transformers' ids for MMS, prompts for codec voices, and refusals that name the field."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import VitsTokenizer

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.models import ModelFiles
from polymux.core.plugins import load_plugins
from polymux.core.tasks import Speak
from polymux.modalities.tts.characters import CharacterReader
from polymux.modalities.tts.front import VitsFront
from polymux.modalities.tts.plugin import CsmSpeech, FlatSpeech, VitsSpeech
from polymux.modalities.tts.work import Piece, SpeakWork

VOCABULARY = {symbol: id for id, symbol in enumerate("kq'zyxwvutsrponmlihgfedcba -_ţș")}
TEXT = "Hello, World! It's -- twenty-two o'clock.  Zoë has 3 cats."


def reader(**config: Any) -> CharacterReader:
    return CharacterReader(VOCABULARY, {"phonemize": False, **config})


@pytest.mark.parametrize("text", [TEXT, "  a ", "UPPER", "…", "a\tb", "ț ş", "x" * 50])
@pytest.mark.parametrize("blank", [True, False])
def test_ids_are_those_of_transformers(tmp_path: Path, text: str, blank: bool) -> None:
    path = tmp_path / "vocab.json"
    path.write_text(json.dumps(VOCABULARY))
    theirs = VitsTokenizer(str(path), phonemize=False, add_blank=blank, language="ron")
    expected = theirs(text).input_ids
    found, spans = reader(add_blank=blank, language="ron").read(text)
    assert found == (expected if any(expected) else [])
    if found:
        assert "".join(span.text for span in spans) == text
        assert spans[0].first == int(blank)
        assert all(one.end == two.first for one, two in itertools.pairwise(spans))
        assert spans[-1].end in (len(found), len(found) - 1)


def test_scripts_that_need_a_romaniser_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uroman", None)
    with pytest.raises(InvalidRequest, match="uroman"):
        reader(is_uroman=True).read("안녕")
    assert reader(is_uroman=True).read("abc")[0]


def test_models_of_phonemes_want_phonemes() -> None:
    with pytest.raises(InvalidRequest, match="input_type phonemes"):
        reader(phonemize=True).read("abc")
    assert reader(phonemize=True).read("abc", phonemes=True)[0]
    with pytest.raises(InvalidRequest, match="not phonemes"):
        reader().read("abc", phonemes=True)


def front(**options: Any) -> VitsFront:
    return VitsFront(reader(), ["anna", "bert"], 16_000, several=True)


def pieces(ask: Speak) -> list[Piece]:
    prepared = front().prepare("speak", ask)
    return list(prepared.messages)  # type: ignore[arg-type]


def test_pieces_pauses_and_the_end() -> None:
    found = pieces(Speak(text="<speak>one. Two.<break time='1s'/>three</speak>", kind="ssml", speed=2.0))
    assert [bool(piece.ids) for piece in found] == [True, True, False, True, False]
    assert [piece.pace for piece in found if piece.ids] == [2.0] * 3
    assert found[2].pause == 1.0
    assert found[-1] == Piece(last=True)


def test_no_word_of_a_long_text_is_lost() -> None:
    text = "some words, and others; " * 60 + "the end. Then more!"
    spoken = "".join(span.text for piece in pieces(Speak(text=text)) for span in piece.words)
    assert spoken == text


def test_voices_and_seeds() -> None:
    work = front().prepare("speak", Speak(text="x", voice="bert", seed=7)).work
    assert work == SpeakWork(1, 7)
    assert front().prepare("speak", Speak(text="x", voice="alloy")).work.speaker == 0  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match="anna, bert"):
        front().prepare("speak", Speak(text="x", voice="carl"))


@pytest.mark.parametrize("text", ["", " ", "😀", "日本", "...", "123"])
def test_nothing_to_say_is_refused(text: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        front().prepare("speak", Speak(text=text))
    assert refused.value.param == "input"


def test_the_right_pipeline_takes_a_folder(tmp_path: Path) -> None:
    plugins = load_plugins()
    speech = {"codec": "codec", "first": 5, "codebooks": 3, "size": 16, "end": 4}
    configs = {
        VitsSpeech.name: {"model_type": "vits", "architectures": ["VitsModel"], "vocab_size": 30},
        CsmSpeech.name: {"model_type": "csm", "architectures": ["CsmForConditionalGeneration"], "codec_config": {}},
        FlatSpeech.name: {
            "model_type": "llama",
            "architectures": ["LlamaForCausalLM"],
            "vocab_size": 97,
            "speech": speech,
        },
    }
    for pipeline in (VitsSpeech(), CsmSpeech(), FlatSpeech()):
        folder = tmp_path / pipeline.name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(configs[pipeline.name]))
        files = ModelFiles("test", folder)
        assert pipeline.accepts(files)
        others = [other for other in plugins.pipelines() if other.name != pipeline.name]
        assert not any(other.accepts(files) for other in others)
    with pytest.raises(ModelError, match=r"vocab\.json is missing"):
        VitsSpeech().front(ModelFiles("test", tmp_path / VitsSpeech.name), {})
    with pytest.raises(ModelError, match="no folder of a codec"):
        FlatSpeech().front(ModelFiles("test", tmp_path / FlatSpeech.name), {})
