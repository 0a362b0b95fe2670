"""The device-free half of embedding: texts become token ids, vectors come back in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import ContextTooLong, InvalidRequest
from polymux.core.generation.limits import MAX_INPUTS, check_ids, read_longest_input, read_width
from polymux.core.generation.spelling import spell_or_read
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Detokenize, Done, Embed, Tokenize, Vector
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.llm.modules import Prompts, read_modules, read_prompts
from polymux.modalities.llm.work import EmbedWork, Vectors

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles


class EmbedFront(Front):
    """Embeddings of one text encoder. `longest` is in tokens with the special ones, `width` in dimensions."""

    def __init__(
        self, tokenizer: Tokenizer, longest: int, vocabulary: int, width: int, prompts: Prompts | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = prompts or Prompts({})
        self.longest = longest
        self.vocabulary = vocabulary
        self.width = width

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> EmbedFront:
        """Raises `ModelError` when a file is missing or does not say how wide and long the model is."""
        tokenizer = Tokenizer.load(files)
        vocabulary = files.config().get("vocab_size", tokenizer.size)
        width = read_modules(files).width(read_width(files))
        return cls(tokenizer, read_longest_input(files), vocabulary, width, read_prompts(files))

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if isinstance(ask, Tokenize | Detokenize):
            return spell_or_read(self.tokenizer, ask, self.longest, self.vocabulary)
        if not isinstance(ask, Embed):
            raise InvalidRequest(f"This model does not serve {task}.")
        if not 1 <= len(ask.inputs) <= MAX_INPUTS:
            raise InvalidRequest(f"input holds {len(ask.inputs)} texts; 1 to {MAX_INPUTS} are allowed.", param="input")
        if ask.dimensions is not None and not 1 <= ask.dimensions <= self.width:
            raise InvalidRequest(f"dimensions must be from 1 to {self.width}.", param="dimensions")
        prompt = self._find_prompt(ask.prompt)
        work = EmbedWork.of(self._read_inputs(ask.inputs, ask.truncate, prompt), dimensions=ask.dimensions)
        return Prepared(work, facts={"prompt_tokens": len(work.ids)})

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return EmbedPresenter(prepared.work)

    def describe(self) -> dict[str, Any]:
        return {"dimensions": self.width, "longest_input": self.longest, "prompts": sorted(self.prompts.texts)}

    def _find_prompt(self, name: str | None) -> str:
        """What comes before every text: the model's own default where none is asked for."""
        name = self.prompts.default if name is None else name
        if name is None:
            return ""
        if name not in self.prompts.texts:
            known = ", ".join(sorted(self.prompts.texts)) or "none"
            raise InvalidRequest(f"This model has no prompt {name!r}; it has: {known}.", param="prompt_name")
        return self.prompts.texts[name]

    def _read_inputs(
        self, inputs: Sequence[str | list[int] | dict[str, Any]], truncate: bool, prompt: str
    ) -> list[list[int]]:
        """Texts with the model's special tokens, all encoded at once; token ids as they are. Empty ones are refused."""
        found: list[list[int]] = []
        texts: dict[int, str] = {}
        for index, each in enumerate(inputs):
            if not each:
                raise InvalidRequest(f"input[{index}] is empty.", param="input")
            if isinstance(each, list):
                ids = check_ids(each, self.vocabulary, f"input[{index}]", "input")
                found.append(ids[: self.longest] if truncate else ids)
                continue
            texts[index] = self._check_text(prompt + self._read_text(each, index), index, truncate)
            found.append([])
        encoded = self.tokenizer.encode_many(list(texts.values()), longest=self.longest if truncate else None)
        for index, ids in zip(texts, encoded):
            found[index] = ids
        for index, ids in enumerate(found):
            if not ids:
                raise InvalidRequest(f"input[{index}] has no tokens.", param="input")
            if len(ids) > self.longest:
                raise self._too_long(index, str(len(ids)))
        return found

    @staticmethod
    def _read_text(part: str | dict[str, Any], index: int) -> str:
        if isinstance(part, str):
            return part
        if part.get("type") != "text":
            raise InvalidRequest(f"input[{index}] is a picture; this model embeds text only.", param="input")
        return str(part["text"])

    def _check_text(self, text: str, index: int, truncate: bool) -> str:
        """The text as it is: one that is surely too long need not be encoded."""
        sure = self.tokenizer.count_at_least(text)
        if sure > self.longest and not truncate:
            raise self._too_long(index, f"at least {sure}")
        return text

    def _too_long(self, index: int, tokens: str) -> ContextTooLong:
        return ContextTooLong(
            f"input[{index}] has {tokens} tokens; this model reads {self.longest}. Shorten it, or set truncate.",
            param="input",
        )


class EmbedPresenter(Presenter):
    """Tells the vectors of one embedding job in the order of its inputs, whatever order they come in."""

    def __init__(self, work: EmbedWork) -> None:
        self._work = work
        self._next = 0
        self._early: dict[int, list[Vector]] = {}

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(body=body):
                vectors = unpack(body, Vectors)
                self._early[vectors.first] = list(vectors.split())
                answers: list[msgspec.Struct] = []
                while self._next in self._early:
                    told = self._early.pop(self._next)
                    self._next += len(told)
                    answers += told
                return answers
            case Ended(receipt=receipt):
                return [Done(Usage(input_tokens=len(self._work.ids), cached_tokens=receipt.cached_units), receipt)]
        return []
