"""Small tokenizers that can read any text, and know the words of the scenes as one token each."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

from questions import list_questions
from scenes import FAMILIES, list_scenes
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SIZE = 800


def list_texts() -> Iterable[str]:
    """Every caption, question and answer; a plain one of each is enough, since words are what is learnt."""
    scenes = list_scenes(tuple(FAMILIES), held_out=False)
    for scene in scenes[:: max(1, len(scenes) // 2000)]:
        yield scene.caption
        if scene.family != "film":
            yield from itertools.chain.from_iterable((each.text, each.answer) for each in list_questions(scene))


def make_tokenizer(marks: Sequence[str], *, lower: bool = False) -> Tokenizer:
    """Byte-level pairs, the same on every machine. `marks` are tokens of their own, the first ids. `lower`: the texts
    will be read in lower case."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZE,
        special_tokens=list(marks),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    texts = (text.lower() if lower else text for text in list_texts())
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks])
    return tokenizer
