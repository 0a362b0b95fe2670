"""Text as VITS models of the MMS kind read it: characters, lower-cased, with a blank between each two.

The tokenizer's files are transformers'. Models that read phonemes (`phonemize`) are given phonemes; those whose letters
are romanised first (`is_uroman`) need the package `uroman` for text in other scripts, and refuse it without.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from polymux.core.errors import InvalidRequest, ModelError
from polymux.core.speech.telling import split_words
from polymux.modalities.tts.work import WordSpan

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

CEDILLAS = str.maketrans("ț", "ţ")
"""MMS learnt Romanian from texts that spell it so."""


class CharacterReader:
    """`read` gives a text's ids, and which of them each word is."""

    def __init__(self, vocabulary: dict[str, int], config: dict[str, Any]) -> None:
        self.vocabulary = vocabulary
        self.phonemic = bool(config.get("phonemize", True))
        self._romanised = bool(config.get("is_uroman", False))
        self._lowered = bool(config.get("normalize", True))
        self._blanks = bool(config.get("add_blank", True))
        self._romanian = config.get("language") == "ron"
        blanks = {id: name for name, id in vocabulary.items()}
        if self._blanks and 0 not in blanks:
            raise ModelError("vocab.json has no token 0 to stand between characters")

    @classmethod
    def load(cls, files: ModelFiles) -> CharacterReader:
        """Raises `ModelError` when vocab.json is missing."""
        vocabulary = files.json("vocab.json")
        if not vocabulary:
            raise ModelError(f"{files.reference}: vocab.json is missing")
        return cls(vocabulary, files.json("tokenizer_config.json") or {})

    def read(self, text: str, *, phonemes: bool = False) -> tuple[list[int], list[WordSpan]]:
        """What the vocabulary lacks is silent. Raises `InvalidRequest` for text that this model cannot read as text."""
        if self.phonemic and not phonemes:
            raise InvalidRequest("this model reads phonemes: send them with input_type phonemes", param="input")
        if phonemes and not self.phonemic:
            raise InvalidRequest("this model reads letters, not phonemes", param="input_type")
        kept: list[tuple[str, int]] = []
        words = split_words(text)
        for number, word in enumerate(words):
            plain = self._romanise(word) if not phonemes else word
            kept += ((character, number) for character in self._normalise(plain) if character in self.vocabulary)
        while kept and kept[-1][0].isspace():
            kept.pop()
        while kept and kept[0][0].isspace():
            kept.pop(0)
        ids = [self.vocabulary[character] for character, _ in kept]
        if not ids:
            return [], []
        if self._blanks:
            ids = [0, *(id for each in ids for id in (each, 0))]
        return ids, list(self._span(words, [number for _, number in kept]))

    def _normalise(self, word: str) -> str:
        if self._romanian:
            word = word.translate(CEDILLAS)
        if not self._lowered:
            return word
        # a capital letter that the model has is kept
        return "".join(character if character in self.vocabulary else character.lower() for character in word)

    def _romanise(self, word: str) -> str:
        if not self._romanised or word.isascii():
            return word
        if find_spec("uroman") is None:
            raise InvalidRequest(
                "this model reads Latin letters; for other scripts its server needs the package uroman "
                "(pip install uroman), or send the text romanised",
                param="input",
            )
        import uroman

        return str(uroman.Uroman().romanize_string(word))

    def _span(self, words: list[str], owners: list[int]) -> Iterator[WordSpan]:
        """A word that has no sound goes with the one before it, or the first with a sound."""
        step, place, told = (2, 1, 0) if self._blanks else (1, 0, 0)
        heard = [(number, len(list(group))) for number, group in groupby(owners)]
        for index, (_, count) in enumerate(heard):
            following = heard[index + 1][0] if index + 1 < len(heard) else len(words)
            yield WordSpan("".join(words[told:following]), place, place + step * count)
            told, place = following, place + step * count
