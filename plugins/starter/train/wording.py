"""How scenes are asked for in words, and the vocabulary that spells them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch
from scenes import OPPOSITE, Scene, tell_motion, with_article
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

PAD, UNKNOWN, START, END = "[PAD]", "[UNK]", "[BOS]", "[EOS]"
MARKS = (PAD, UNKNOWN, START, END)

WRAPS = ("{}", "draw {}", "a picture of {}", "{}, please")
"""Around any wording: a model that has seen only bare captions stumbles over a polite request."""


def list_wordings(scene: Scene) -> list[str]:
    """Ways to say the same: the caption, and for a pair also the other way round."""
    if scene.family == "pair":
        first, second = (with_article(thing.phrase) for thing in scene.things)
        back = OPPOSITE[scene.how]
        return [scene.caption, f"{second} {f'{back} of' if scene.how == 'left' else back} {first}"]
    if scene.family == "one":
        return [
            scene.caption,
            scene.caption.replace(" in the middle", " in the centre").replace(" at the ", " on the "),
        ]
    if scene.family == "film":
        return [scene.caption, f"{with_article(scene.things[0].phrase)} is {tell_motion(scene.how)}"]
    return [scene.caption]


def list_texts(scenes: Iterable[Scene]) -> Iterator[str]:
    """Texts with every word that a scene may be asked for by."""
    yield from (wrap.format("") for wrap in WRAPS)
    for scene in scenes:
        yield from list_wordings(scene)


def build_tokenizer(texts: Iterable[str], length: int) -> PreTrainedTokenizerFast:
    """A word is a token, and so is a mark; unknown words are `[UNK]`. `length`: tokens of a padded text."""
    split = pre_tokenizers.Split(Regex(r"\w+|[^\w\s]"), "removed", invert=True)
    lower = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    words: set[str] = set()
    for text in texts:
        words.update(word for word, _ in split.pre_tokenize_str(lower.normalize_str(text)))
    vocabulary = {word: id for id, word in enumerate([*MARKS, *sorted(words)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.normalizer, tokenizer.pre_tokenizer = lower, split
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A {END}", special_tokens=[(mark, vocabulary[mark]) for mark in (START, END)]
    )
    names = {"pad_token": PAD, "unk_token": UNKNOWN, "bos_token": START, "eos_token": END}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=length, **names)


def spell_scenes(scenes: Sequence[Scene], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """(scenes, wordings, length) int64; a scene with fewer wordings than another repeats its own."""
    told = [[wrap.format(text) for text in list_wordings(scene) for wrap in WRAPS] for scene in scenes]
    most = max(map(len, told))
    flat = [texts[place % len(texts)] for texts in told for place in range(most)]
    return spell(flat, tokenizer).view(len(scenes), most, -1)


def spell(texts: list[str], tokenizer: PreTrainedTokenizerFast) -> Tensor:
    """(texts, length) int64."""
    spelled = tokenizer(texts, padding="max_length", truncation=True, max_length=tokenizer.model_max_length)
    return torch.tensor(spelled["input_ids"])
