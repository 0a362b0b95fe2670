"""A text as an encoder of a fixed length reads it."""

from __future__ import annotations

import tempfile
from pathlib import Path

import tokenizers
from tokenizers import Regex, models, normalizers, pre_tokenizers, processors

from polymux.core.errors import ContextTooLong, ModelError
from polymux.core.models import ModelFiles
from polymux.core.models.convert.converter import run_module
from polymux.core.models.files import read_json
from polymux.core.text.tokenizer import Tokenizer, named_tokens

START, END = "<|startoftext|>", "<|endoftext|>"

WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
"""What CLIP takes for words."""


class Speller:
    """Ids for any text: `length` of them, or fewer."""

    def __init__(self, tokenizer: Tokenizer, pad: int, length: int) -> None:
        self.tokenizer = tokenizer
        self.pad = pad
        self.length = length

    @classmethod
    def load(cls, files: ModelFiles, name: str, length: int) -> Speller:
        """From the model's folder `name`. Raises `ModelError` when it holds no tokenizer, or one that cannot pad."""
        part = ModelFiles(f"{files.reference}/{name}", files.path(name))
        if part.has("tokenizer.json"):
            tokenizer = Tokenizer.load(part)
        elif not is_clip(part):
            with tempfile.TemporaryDirectory() as folder:  # once at start: it takes a few seconds
                run_module("polymux.core.models.convert.tokenizer", part.folder, Path(folder))
                tokenizer = Tokenizer.load(ModelFiles(part.reference, Path(folder)))
        else:
            named = named_tokens(part.json("special_tokens_map.json")) | named_tokens(
                part.json("tokenizer_config.json")
            )
            tokenizer = Tokenizer(build_clip(part.path("vocab.json"), part.path("merges.txt")), special_tokens=named)
        pad = tokenizer.find(tokenizer.special_tokens.get("pad_token"))
        if pad is None:
            raise ModelError(f"{part.reference} names no pad_token")
        return cls(tokenizer, pad, length)

    def spell(self, text: str, *, cut: bool, padded: bool, param: str) -> tuple[tuple[int, ...], int]:
        """The ids, and how many they are before the padding.

        Raises `ContextTooLong` for a text that is longer, unless it may be `cut`.
        """
        ids = self.tokenizer.encode(text, longest=self.length if cut else None)
        if len(ids) > self.length:
            raise ContextTooLong(f"{param} has {len(ids)} tokens; the model reads {self.length}", param=param)
        return (*ids, *[self.pad] * (self.length - len(ids) if padded else 0)), len(ids)


def is_clip(part: ModelFiles) -> bool:
    """Whether the two old files of a tokenizer are CLIP's."""
    return part.has("merges.txt") and START in part.path("vocab.json").read_text(encoding="utf-8")


def build_clip(vocabulary: Path, merges: Path) -> tokenizers.Tokenizer:
    """CLIP's tokenizer from the two files that its older folders have in place of a tokenizer.json."""
    lines = [line.split() for line in merges.read_text(encoding="utf-8").splitlines() if not line.startswith("#")]
    pairs = [(line[0], line[1]) for line in lines if len(line) == 2]
    ids = read_json(vocabulary)
    if START not in ids or END not in ids:
        raise ModelError(f"{vocabulary} is no vocabulary of CLIP: it lacks {START} or {END}")
    tokenizer = tokenizers.Tokenizer(models.BPE(ids, pairs, end_of_word_suffix="</w>", unk_token=END))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Lowercase()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(WORDS), "removed", invert=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.post_processor = processors.RobertaProcessing(
        (END, ids[END]), (START, ids[START]), trim_offsets=False, add_prefix_space=False
    )
    tokenizer.add_special_tokens([START, END])
    return tokenizer
