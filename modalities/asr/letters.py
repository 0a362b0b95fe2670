"""Where letters lie in a recording: the likeliest way of a CTC model through a text that is known (Graves et al. 2006;
torchaudio's `forced_align` finds the same)."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from polymux.core.errors import ModelError
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.asr.words import split_characters


@dataclass(frozen=True)
class Alphabet:
    """A CTC model's classes. `ids` maps its letters; `space` stands between words, where it has such a class."""

    ids: dict[str, int]
    blank: int
    space: int | None

    @classmethod
    def load(cls, folder: Path) -> Alphabet:
        """From `vocab.json` and `config.json`. Raises `ModelError`."""
        try:
            vocabulary = json.loads((folder / "vocab.json").read_text())
            blank = json.loads((folder / "config.json").read_text()).get("pad_token_id")
        except (OSError, ValueError) as error:
            raise ModelError(f"{folder} holds no CTC model with letters: {error}") from error
        if not isinstance(blank, int) or not isinstance(vocabulary, dict):
            raise ModelError(f"{folder} holds no CTC model with letters: its blank or its vocabulary is missing")
        letters = {letter: id for letter, id in vocabulary.items() if len(letter) == 1 and letter != "|"}
        return cls(letters, blank, vocabulary.get("|"))

    def spell(self, text: str) -> list[int]:
        """The letters of a text that the model knows, in its own case; accents are left out where it has none."""
        found = []
        for character in text:
            for form in (character, *unicodedata.normalize("NFKD", character)[:1]):
                id = next((self.ids[each] for each in (form, form.upper(), form.lower()) if each in self.ids), None)
                if id is not None:
                    found.append(id)
                    break
        return found


@dataclass(frozen=True)
class Spelling:
    """A text as the model's classes. `owners[i]` is the token that class i belongs to; -1 between words."""

    classes: list[int]
    owners: list[int]
    voiced: list[bool]
    """By token, whether it is said at all: punctuation is not."""


def spell_tokens(tokens: Sequence[int], tokenizer: Tokenizer, alphabet: Alphabet) -> Spelling:
    """Tokens that share a character count as the first of them."""
    classes: list[int] = []
    owners: list[int] = []
    voiced = [False] * len(tokens)
    place = 0
    for text, count in split_characters(tokens, tokenizer):
        letters = alphabet.spell(text)
        if letters and classes and text[:1].isspace() and alphabet.space is not None:
            classes.append(alphabet.space)
            owners.append(-1)
        classes += letters
        owners += [place] * len(letters)
        voiced[place] = any(character.isalnum() for character in text)
        place += count
    return Spelling(classes, owners, voiced)


def align(logprobs: np.ndarray, classes: Sequence[int], blank: int) -> np.ndarray | None:
    """Per class its first frame and the one behind its last, (L, 2) int64, on the likeliest way through `logprobs`
    (frames, classes); None where there are too few frames for the text."""
    repeats = sum(one == other for one, other in pairwise(classes))
    frames, states = len(logprobs), 2 * len(classes) + 1
    if not classes or frames < len(classes) + repeats:
        return None
    labels = np.full(states, blank)
    labels[1::2] = classes
    skips = np.zeros(states, bool)
    skips[3::2] = labels[3::2] != labels[1:-2:2]
    score = np.full(states, -np.inf)
    score[:2] = logprobs[0, labels[:2]]
    steps = np.zeros((frames, states), np.int8)
    for frame in range(1, frames):
        moved = np.full((3, states), -np.inf)
        moved[0] = score
        moved[1, 1:] = score[:-1]
        moved[2, 2:] = np.where(skips[2:], score[:-2], -np.inf)
        steps[frame] = moved.argmax(axis=0)
        score = moved.max(axis=0) + logprobs[frame, labels]
    state = states - 1 if score[-1] > score[-2] else states - 2
    spans = np.zeros((len(classes), 2), np.int64)
    spans[:, 0] = frames
    for frame in range(frames - 1, -1, -1):
        if state % 2:
            spans[state // 2] = min(frame, spans[state // 2, 0]), max(frame + 1, spans[state // 2, 1])
        state -= steps[frame, state]
    return spans


def time_tokens(spelling: Spelling, spans: np.ndarray, last: float) -> tuple[list[float], list[float]]:
    """Where each token begins and ends, in frames. One that is not spelled lies between its neighbours if it is said
    (a number), and at the end of the one before it if it is not. `last` is where the recording ends."""
    count = len(spelling.voiced)
    starts, ends = [-1.0] * count, [-1.0] * count
    for owner, (start, end) in zip(spelling.owners, spans.tolist()):
        if owner >= 0:
            starts[owner] = start if starts[owner] < 0 else starts[owner]
            ends[owner] = end
    before = 0.0
    for place in range(count):
        if ends[place] >= 0:
            before = ends[place]
            continue
        after = next((start for start in starts[place + 1 :] if start >= 0), last)
        starts[place], ends[place] = before, after if spelling.voiced[place] else before
        before = ends[place]
    return starts, ends
