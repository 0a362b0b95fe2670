"""The tokenizer agrees with the library and with transformers, and spells every token in bytes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.models import ModelFiles
from polymux.core.testing import tokenizers as small
from polymux.core.text.tokenizer import Tokenizer

BYTES = Tokenizer(small.byte_level())
PIECES = Tokenizer(small.sentencepiece())
WORDS = Tokenizer(small.wordpiece())


@given(st.text())
def test_bytes_of_byte_level_tokens_are_the_text(text: str):
    ids = BYTES.encode(text)
    assert b"".join(map(BYTES.token_bytes, ids)) == text.encode()
    assert BYTES.decode(ids, skip_special=False) == text


@given(st.lists(st.integers(0, BYTES.size - 1)))
def test_any_byte_level_tokens_decode_as_their_bytes(ids: list[int]):
    """The incremental detokenizer stands on this: the library's text is the bytes', for added tokens too."""
    assert b"".join(map(BYTES.token_bytes, ids)).decode(errors="replace") == BYTES.decode(ids, skip_special=False)


@given(st.text(alphabet=st.characters(exclude_characters="▁", exclude_categories=["Cs"])))
def test_bytes_of_fallback_tokens_are_the_text(text: str):
    """SentencePiece begins a text with a space of its own; each token keeps its space, as inside a text."""
    ids = PIECES.encode(text, special=False)
    assert b"".join(map(PIECES.token_bytes, ids)).decode().removeprefix(" ") == text.removeprefix(" " * (not ids))


def test_wordpiece_tokens_know_whether_they_begin_a_word():
    ids = WORDS.encode("quick brown foxes", special=False)
    assert b"".join(map(WORDS.token_bytes, ids)) == b" quick brown foxes"


def test_truncation_and_padding_of_the_file_are_ignored_and_the_post_processor_honoured():
    """Sentence-transformers files pad to 128 and cut at 128; an embedding must see the text it was given."""
    ids = WORDS.encode("the quick brown fox " * 20)
    assert len(ids) > 60 and (ids[0], ids[-1]) == (WORDS.find("[CLS]"), WORDS.find("[SEP]"))
    assert len(WORDS.encode("dog")) == len(WORDS.encode("dog", special=False)) + 2


def test_a_text_cut_to_length_keeps_its_special_tokens():
    ids = WORDS.encode("the quick brown fox " * 20, longest=7)
    assert len(ids) == 7 and ids[-1] == WORDS.find("[SEP]")
    assert ids[1:-1] == WORDS.encode("the quick brown fox " * 20, special=False)[:5]
    assert WORDS.encode("dog", longest=99) == WORDS.encode("dog")


def test_unknown_ids_have_no_text():
    """A model's embedding table is often larger than its tokenizer; such an id must not break an answer."""
    assert BYTES.token_bytes(BYTES.size + 5) == b""
    assert BYTES.decode([BYTES.size + 5, *BYTES.encode("a")]) == "a"


def test_a_lone_surrogate_is_the_users_mistake():
    with pytest.raises(InvalidRequest, match="surrogate"):
        BYTES.encode("a\ud800b")


@given(st.text(max_size=300))
def test_the_quick_count_never_exceeds_the_real_one(text: str):
    for tokenizer in (BYTES, PIECES, WORDS):
        assert tokenizer.count_at_least(text) <= len(tokenizer.encode(text, special=False))
    assert BYTES.count_at_least("x" * 100_000) > 1000


def test_end_tokens_are_collected_from_every_file(tmp_path: Path):
    """Instruct models name their end of turn in generation_config.json only, others in the tokenizer's files."""
    small.byte_level().save(str(tmp_path / "tokenizer.json"))
    for name, value in {
        "config.json": {"eos_token_id": 1},
        "generation_config.json": {"eos_token_id": [1, 7]},
        "tokenizer_config.json": {"eos_token": {"content": "<|im_end|>"}, "bos_token": "<s>", "pad_token": None},
    }.items():
        (tmp_path / name).write_text(json.dumps(value))
    tokenizer = Tokenizer.load(ModelFiles("mine", tmp_path))
    assert tokenizer.eos_ids == {1, 7, tokenizer.find("<|im_end|>")}
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "<|im_end|>"}


def test_missing_and_broken_files_are_model_errors(tmp_path: Path):
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        Tokenizer.load(ModelFiles("mine", tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match="cannot be read"):
        Tokenizer.load(ModelFiles("mine", tmp_path))


@given(st.text())
def test_ids_equal_those_of_transformers(text: str):
    transformers = pytest.importorskip("transformers")
    for build in (small.byte_level, small.sentencepiece):
        theirs = THEIRS.setdefault(build, transformers.PreTrainedTokenizerFast(tokenizer_object=build()))
        ours = BYTES if build is small.byte_level else PIECES
        ids = ours.encode(text)
        assert ids == theirs(text)["input_ids"]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


THEIRS: dict = {}


def test_the_text_package_needs_no_torch():
    """The gateway's processes import this; torch would cost them seconds and half a gigabyte."""
    code = (
        "import sys, polymux.core.text.template, polymux.core.text.detokenizer, polymux.core.text.stops\n"
        "import polymux.modalities.llm.plugin, polymux.core.generation.front\n"
        "print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
