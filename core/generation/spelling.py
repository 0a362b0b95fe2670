"""What a front answers by itself: texts spelled in the model's tokens, and tokens read as text."""

from __future__ import annotations

from collections.abc import Sequence

from polymux.core.errors import InvalidRequest
from polymux.core.generation.limits import check_ids
from polymux.core.pipeline import Prepared
from polymux.core.tasks import Detokenize, Detokenized, Done, Tokenize, Tokenized
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Receipt, Usage


def spell_or_read(tokenizer: Tokenizer, ask: Tokenize | Detokenize, longest: int, vocabulary: int) -> Prepared:
    """Answers without an engine. Raises `InvalidRequest`."""
    if isinstance(ask, Detokenize):
        text = tokenizer.decode(check_ids(ask.ids, vocabulary, "tokens", "tokens"), skip_special=False)
        return Prepared(None, answers=[Detokenized(text), _done(len(ask.ids))])
    if ask.chat is not None:
        raise InvalidRequest("This model has no chat template; give a prompt.", param="messages")
    return spell(tokenizer, tokenizer.encode(ask.text, special=ask.special), longest)


def spell(tokenizer: Tokenizer, ids: Sequence[int], longest: int) -> Prepared:
    names = [tokenizer.name(id) for id in ids]
    return Prepared(None, answers=[Tokenized(list(ids), names, longest), _done(len(ids))])


def _done(tokens: int) -> Done:
    return Done(Usage(input_tokens=tokens), Receipt())
