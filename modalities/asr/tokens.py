"""Whisper's special tokens: what they are in one model, from its own files. Both halves of the pipeline read them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from polymux.core.errors import ModelError
from polymux.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
ENGLISH_ONLY = 51864
"""The vocabulary of the models that know one language."""
STAMP_SECONDS = 0.02


@dataclass(frozen=True)
class SpeechTokens:
    """Ids. `languages` maps codes to ids and is empty for a model that knows English alone."""

    end: int
    start: int
    previous: int
    no_speech: int
    no_timestamps: int
    transcribe: int
    translate: int
    languages: dict[str, int]
    suppressed: tuple[int, ...] = ()
    """Never sampled."""
    suppressed_first: tuple[int, ...] = ()
    """Never sampled first."""
    latest_start: int | None = None
    """The latest timestamp that may come first, in steps of 20 ms."""
    longest: int | None = None
    """The most tokens of an answer. None: what the context has room for."""

    @property
    def first_stamp(self) -> int:
        """<|0.00|>; every id from here on is a timestamp."""
        return self.no_timestamps + 1

    @property
    def multilingual(self) -> bool:
        return bool(self.languages)

    def forced(self, task: str, language: int | None) -> list[int]:
        """What the decoder is given before it speaks, with timestamps. `language` is None for English alone."""
        if language is None:
            return [self.start]
        return [self.start, language, self.translate if task == "translate" else self.transcribe]

    @classmethod
    def load(cls, files: ModelFiles, tokenizer: Tokenizer) -> SpeechTokens:
        """Raises `ModelError` when the tokenizer lacks one of Whisper's tokens."""

        def find(*names: str) -> int:
            for name in names:
                if (id := tokenizer.find(f"<|{name}|>")) is not None:
                    return id
            raise ModelError(f"{files.reference}: the tokenizer has no <|{names[0]}|>, so this is no Whisper model")

        published = {**files.config(), **files.json("generation_config.json")}
        for name in ("suppress_tokens", "begin_suppress_tokens"):
            if max(published.get(name) or (0,)) >= max(tokenizer.size, published.get("vocab_size", 0)):
                raise ModelError(f"{files.reference}: {name} names tokens that the model has not")
        return cls(
            end=find("endoftext"),
            start=find("startoftranscript"),
            previous=find("startofprev"),
            no_speech=find("nospeech", "nocaptions"),
            no_timestamps=find("notimestamps"),
            transcribe=find("transcribe"),
            translate=find("translate"),
            languages=list_languages(published, tokenizer),
            suppressed=tuple(published.get("suppress_tokens") or ()),
            suppressed_first=tuple(published.get("begin_suppress_tokens") or ()),
            latest_start=published.get("max_initial_timestamp_index"),
            longest=published.get("max_length") or None,
        )


def list_languages(published: dict[str, Any], tokenizer: Tokenizer) -> dict[str, int]:
    """The languages that a multilingual model knows; the vocabulary of English-only ones names them all the same."""
    multilingual = published.get("is_multilingual", published.get("vocab_size", 0) > ENGLISH_ONLY)
    if not multilingual:
        return {}
    listed = published.get("lang_to_id")
    if not listed:
        listed = {tokenizer.token_bytes(id).decode(): id for id in tokenizer.special_ids}
    return {match[1]: id for token, id in listed.items() if (match := LANGUAGE.fullmatch(token))}
