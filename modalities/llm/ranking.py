"""The device-free half of ranking: pairs of texts become token ids, scores come back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import ContextTooLong, InvalidRequest
from polymux.core.generation.limits import MAX_INPUTS, read_longest_input
from polymux.core.generation.spelling import spell_or_read
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Detokenize, Done, Rank, Score, Tokenize
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.llm.work import RankWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


class RankFront(Front):
    """Pairs of texts for one cross-encoder. `longest` is in tokens, both texts and the special ones together."""

    def __init__(self, tokenizer: Tokenizer, longest: int, vocabulary: int) -> None:
        self.tokenizer = tokenizer
        self.longest = longest
        self.vocabulary = vocabulary

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> RankFront:
        """Raises `ModelError` when a file is missing or does not say how long the model is."""
        tokenizer = Tokenizer.load(files)
        return cls(tokenizer, read_longest_input(files), files.config().get("vocab_size", tokenizer.size))

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if isinstance(ask, Tokenize | Detokenize):
            return spell_or_read(self.tokenizer, ask, self.longest, self.vocabulary)
        if not isinstance(ask, Rank):
            raise InvalidRequest(f"This model does not serve {task}.")
        if not 1 <= len(ask.pairs) <= MAX_INPUTS:
            raise InvalidRequest(f"There are {len(ask.pairs)} pairs; 1 to {MAX_INPUTS} are allowed.", param="documents")
        pairs = [self._read_pair(*pair, ask.truncate) for pair in ask.pairs]
        work = RankWork(inputs=[ids for ids, _ in pairs], segments=[segments for _, segments in pairs])
        return Prepared(work, facts={"prompt_tokens": sum(map(len, work.inputs))})

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        work = prepared.work
        return RankPresenter(sum(map(len, work.inputs)) if isinstance(work, RankWork) else 0)

    def describe(self) -> dict[str, Any]:
        return {"longest_input": self.longest}

    def _read_pair(self, first: str, second: str, truncate: bool) -> tuple[list[int], list[int]]:
        sure = self.tokenizer.count_at_least(first) + (0 if truncate else self.tokenizer.count_at_least(second))
        if sure > self.longest:
            raise self._too_long(f"at least {sure}")
        pair = self.tokenizer.encode_pair(first, second, self.longest if truncate else None)
        if len(pair[0]) > self.longest:
            raise self._too_long(str(len(pair[0])))
        if not pair[0]:
            raise InvalidRequest("A pair has no tokens.", param="documents")
        return pair

    def _too_long(self, tokens: str) -> ContextTooLong:
        return ContextTooLong(
            f"A pair has {tokens} tokens; this model reads {self.longest}. Shorten it, or set truncate, which cuts the "
            "second text.",
            param="documents",
        )


class RankPresenter(Presenter):
    """Tells scores as they come; each says which pair it is of."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(body=body):
                return [unpack(body, Score)]
            case Ended(receipt=receipt):
                return [Done(Usage(input_tokens=self._tokens), receipt)]
        return []
