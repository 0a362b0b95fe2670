"""Rerankers that are language models: shown a query and a document, they say yes or no (Qwen3-Reranker and its kin).

A folder of such a model looks like any other language model's, so it is served as one unless it is told otherwise:
`pipeline = "text-ranking"`. Its words are Qwen's unless the option `judge` brings others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from polymux.core.errors import ConfigError, ModelError
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.llm.ranking import RankFront

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


@dataclass(frozen=True)
class Judge:
    """What stands around the two texts, and the two words that may follow. `{query}` and `{instruction}` are put in."""

    prefix: str = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    question: str = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
    suffix: str = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    instruction: str = "Given a web search query, retrieve relevant passages that answer the query"
    yes: str = "yes"
    no: str = "no"

    @classmethod
    def read(cls, options: Mapping[str, Any]) -> Judge:
        """The option `judge`. Raises `ConfigError` for what is none."""
        asked = options.get("judge", {})
        known = {field.name for field in fields(cls)}
        if (
            not isinstance(asked, Mapping)
            or not asked.keys() <= known
            or not all(isinstance(v, str) for v in asked.values())
        ):
            raise ConfigError(f"judge is a table of texts: {', '.join(sorted(known))}", param="judge")
        return cls(**asked)

    def find_words(self, tokenizer: Tokenizer) -> tuple[int, int]:
        """The ids of yes and no. Raises `ModelError` where one of them is no token."""
        ids = [tokenizer.find(word) for word in (self.yes, self.no)]
        if ids[0] is None or ids[1] is None:
            raise ModelError(f"this model has no token {self.yes!r} or no token {self.no!r}: it cannot judge")
        return ids[0], ids[1]


def is_judge(config: Mapping[str, Any]) -> bool:
    """Whether a model's configuration is a language model's."""
    return any(name.endswith(("ForCausalLM", "LMHeadModel")) for name in config.get("architectures") or ())


class JudgeFront(RankFront):
    """Pairs of texts as a judge is asked. A document that is too long is cut where that is allowed."""

    def __init__(self, tokenizer: Tokenizer, longest: int, vocabulary: int, judge: Judge) -> None:
        super().__init__(tokenizer, longest, vocabulary)
        judge.find_words(tokenizer)
        self._judge = judge
        self._before = tokenizer.encode(judge.prefix, special=False)
        self._after = tokenizer.encode(judge.suffix, special=False)

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> JudgeFront:
        """Raises `ModelError` or `ConfigError`."""
        ranks = RankFront.load(files, options)
        return cls(ranks.tokenizer, ranks.longest, ranks.vocabulary, Judge.read(options))

    def _read_pair(self, first: str, second: str, truncate: bool) -> tuple[list[int], list[int]]:
        sure = self.tokenizer.count_at_least(first) + (0 if truncate else self.tokenizer.count_at_least(second))
        if sure > self.longest:
            raise self._too_long(f"at least {sure}")
        asked = self._judge.question.replace("{instruction}", self._judge.instruction).replace("{query}", first)
        ids = [*self._before, *self.tokenizer.encode(asked + second, special=False)]
        room = self.longest - len(self._after)
        if len(ids) > room:
            if not truncate or len(self._before) + len(self.tokenizer.encode(asked, special=False)) > room:
                raise self._too_long(str(len(ids) + len(self._after)))
            ids = ids[:room]
        ids += self._after
        return ids, [0] * len(ids)
