"""Deltas joined are the unary text, for every kind of tokenizer and every way to end a prompt."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polymux.core.testing import tokenizers as small
from polymux.core.text.detokenizer import open_detokenizer
from polymux.core.text.tokenizer import Tokenizer

TOKENIZERS = {
    "byte level": Tokenizer(small.byte_level()),
    "byte fallback": Tokenizer(small.sentencepiece()),
    "wordpiece": Tokenizer(small.wordpiece()),
}


def stream(
    tokenizer: Tokenizer, ids: list[int], context: list[int] | None = None, skip_special: bool = True
) -> list[str]:
    detokenizer = open_detokenizer(tokenizer, context or [], skip_special=skip_special)
    return [*map(detokenizer.push, ids), detokenizer.flush()]


kinds = st.sampled_from(list(TOKENIZERS.values()))


@given(tokenizer=kinds, data=st.data(), skip_special=st.booleans())
def test_deltas_joined_equal_the_unary_decode_of_any_tokens(
    tokenizer: Tokenizer, data: st.DataObject, skip_special: bool
):
    """Any tokens at all: broken characters, special tokens in odd places, ids beyond the vocabulary."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.size + 1), max_size=40))
    assert "".join(stream(tokenizer, ids, skip_special=skip_special)) == tokenizer.decode(
        ids, skip_special=skip_special
    )


@given(tokenizer=kinds, text=st.text(st.characters(exclude_characters="▁", codec="utf-8")), cut=st.integers(1, 30))
def test_an_answer_continues_its_prompt(tokenizer: Tokenizer, text: str, cut: int):
    """The answer begins after the prompt's last complete character, also when the cut falls inside one."""
    ids = tokenizer.encode(text, special=False)
    context, answer = ids[:cut], ids[cut:]
    if tokenizer is TOKENIZERS["wordpiece"]:
        expected = tokenizer.decode(ids).removeprefix(tokenizer.decode(context))
    else:
        data, complete = (b"".join(map(tokenizer.token_bytes, part)) for part in (ids, context))
        expected = data[len(complete.decode(errors="ignore").encode()) :].decode()
    assert "".join(stream(tokenizer, answer, context)) == expected


@given(tokenizer=kinds, data=st.data())
def test_the_prompt_never_appears(tokenizer: Tokenizer, data: st.DataObject):
    """A token-array prompt may end inside a character; nothing complete in it may come out again."""
    prompt = tokenizer.encode("dog", special=False) * 3
    broken = data.draw(st.lists(st.integers(0, tokenizer.size - 1), max_size=3))
    answer = tokenizer.encode("the end", special=False)
    assert "".join(stream(tokenizer, answer, prompt + broken)).strip() in ("the end", "##the end")


@given(text=st.text(alphabet="aé東😀 👩‍👩‍👧", max_size=20))
def test_no_half_characters(text: str):
    """Well-formed text never shows U+FFFD in any delta."""
    for name in ("byte level", "byte fallback"):
        tokenizer = TOKENIZERS[name]
        assert not any("\ufffd" in delta for delta in stream(tokenizer, tokenizer.encode(text, special=False)))


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_character_begun_by_the_prompt_is_finished_by_the_answer(name: str):
    tokenizer = TOKENIZERS[name]
    ids = single_bytes(tokenizer, "a😀b".encode())
    assert "".join(stream(tokenizer, ids[3:], ids[:3])) == "😀b"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
def test_a_character_the_model_leaves_unfinished_is_not_blamed_on_it(name: str):
    """No U+FFFD that the model did not make."""
    tokenizer = TOKENIZERS[name]
    prompt, answer = single_bytes(tokenizer, "a😀".encode()[:3]), [tokenizer.find("t"), tokenizer.find("h")]
    assert "".join(stream(tokenizer, answer, prompt)) == "th"
    assert "".join(stream(tokenizer, [], prompt)) == ""


def test_a_broken_byte_of_the_answer_does_not_drag_the_prompts_characters_down():
    """Byte fallback decodes a run of bytes as a whole: one wrong byte would turn the prompt's é into U+FFFD twice."""
    tokenizer = TOKENIZERS["byte fallback"]
    prompt, answer = single_bytes(tokenizer, "aé東".encode()), single_bytes(tokenizer, b"\xff")
    assert "".join(stream(tokenizer, [*answer, tokenizer.find("th")], prompt)) == "\ufffdth"


def test_a_continuation_keeps_its_leading_space():
    """SentencePiece drops the first space of a text; that of a continuation belongs to it."""
    tokenizer = TOKENIZERS["byte fallback"]
    context, answer = tokenizer.encode("the"), tokenizer.encode(" end", special=False)[-1:]
    assert "".join(stream(tokenizer, answer, context)) == " end"
    assert "".join(stream(tokenizer, answer)) == "end"


@pytest.mark.parametrize("name", ["byte level", "byte fallback"])
@pytest.mark.parametrize("byte", [0xF0, 0x80, 0xFF])
def test_endless_broken_bytes_cost_linear_time(name: str, byte: int):
    """Anyone can make a model repeat one byte (logit_bias); the event loop must not pay quadratically."""
    tokenizer = TOKENIZERS[name]
    ids = single_bytes(tokenizer, bytes([byte])) * 30_000
    start = time.process_time()
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)
    assert time.process_time() - start < 3


def test_endless_special_tokens_cost_linear_time():
    tokenizer = TOKENIZERS["byte fallback"]
    start = time.process_time()
    assert "".join(stream(tokenizer, [2] * 30_000)) == ""
    assert time.process_time() - start < 3


def single_bytes(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """The text byte by byte, where the tokenizer has a token for the byte alone."""
    of_byte = {tokenizer.token_bytes(id): id for id in reversed(range(tokenizer.size))}
    return [of_byte[data[i : i + 1]] for i in range(len(data))]
