"""The device-free half of the language models: requests are checked against the model and become token ids."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.errors import ContextTooLong, InvalidRequest
from polymux.core.generation.habits import Habits, Manner
from polymux.core.generation.limits import MAX_INPUTS, check_ids, read_context
from polymux.core.generation.presenter import GeneratePresenter, Telling
from polymux.core.generation.spelling import spell, spell_or_read
from polymux.core.generation.work import GenerateWork, Guidance
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Chat, Complete, Detokenize, Sampling, Tokenize
from polymux.core.text.calls import CallFormat
from polymux.core.text.grammar import Grammars, write_grammar
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

MAX_STOP_LENGTH = 4096
"""Characters of one stop string."""

SEEDS = 1 << 63


class GenerateFront(Front):
    """Chat and completions of one decoder. `context` is in tokens, prompt and answer together."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context: int,
        vocabulary: int,
        formats: Sequence[CallFormat] = (),
    ) -> None:
        """`formats`: ways to call tools that plugins bring."""
        self.tokenizer = tokenizer
        self.template = template
        self.context = context
        self.vocabulary = vocabulary
        self.adapter: str | None = None
        self.adapters: tuple[str, ...] = ()
        self.grammars = Grammars(tokenizer, vocabulary)
        self.habits = Habits(tokenizer, template, self.grammars, formats)

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> GenerateFront:
        """Raises `ModelError` when a file is missing or does not say how long the context is."""
        tokenizer = Tokenizer.load(files)
        template = ChatTemplate.load(files, tokenizer.special_tokens)
        vocabulary = files.config().get("vocab_size", tokenizer.size)
        front = cls(tokenizer, template, read_context(files), vocabulary, options.get("call_formats", ()))
        front.adapters = tuple(options.get("adapters", ()))
        return front

    def variants(self) -> dict[str, Front]:
        """This front once per adapter; tokenizer and grammars are shared."""
        return {name: self._adapt(name) for name in self.adapters}

    def _adapt(self, name: str) -> GenerateFront:
        front = copy(self)
        front.adapter, front.adapters = name, ()
        return front

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if isinstance(ask, Tokenize) and ask.chat is not None:
            return spell(self.tokenizer, self._read_chat(ask.chat)[0], self.context)
        if isinstance(ask, Tokenize | Detokenize):
            return spell_or_read(self.tokenizer, ask, self.context, self.vocabulary)
        if isinstance(ask, Chat):
            ids, manner = self._read_chat(ask)
            prompts, echoes, param = [ids], None, "messages"
        elif isinstance(ask, Complete):
            prompts = [self._read_prompt(prompt, f"prompt[{i}]") for i, prompt in enumerate(ask.prompts)]
            echoes = [prompt if isinstance(prompt, str) else None for prompt in ask.prompts] if ask.echo else None
            manner, param = self._read_manner(ask), "prompt"
        else:
            raise InvalidRequest(f"This model does not serve {task}.")
        self._check_ask(ask, len(prompts))
        work = GenerateWork(
            prompts=prompts,
            n=ask.n,
            max_tokens=[self._fit(len(prompt), ask.max_tokens, param) for prompt in prompts],
            seeds=choose_seeds(ask.sampling.seed, len(prompts), ask.n),
            sampling=self._check_sampling(ask.sampling),
            stop_token_ids=sorted({*ask.stop_token_ids, *(() if ask.ignore_eos else self.tokenizer.eos_ids)}),
            logprobs=None if ask.logprobs is None else min(ask.logprobs, self.vocabulary),
            score_prompts=echoes is not None and ask.logprobs is not None,
            guidance=manner.guidance,
            adapter=self.adapter,
        )
        telling = Telling(
            ask.stop,
            skip_special=not ask.ignore_eos,
            continues=isinstance(ask, Complete),
            echoes=echoes,
            manner=manner,
            kept=self.habits.kept if isinstance(ask, Chat) else frozenset(),
        )
        return Prepared(work, notes=telling, facts={"prompt_tokens": sum(map(len, prompts))})

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return GeneratePresenter(self.tokenizer, prepared.work, prepared.notes)

    def describe(self) -> dict[str, Any]:
        return {
            "context_length": self.context,
            "vocabulary": self.vocabulary,
            "chat": self.template is not None,
            "tools": self.habits.calls is not None,
            "thinks": self.habits.marks is not None,
            **({"adapters": list(self.adapters)} if self.adapters else {}),
            **({"adapter": self.adapter} if self.adapter else {}),
        }

    def _read_chat(self, ask: Chat) -> tuple[list[int], Manner]:
        if self.template is None:
            raise InvalidRequest("This model has no chat template; use /v1/completions.", param="model")
        text = self._render(ask, self.template)
        # The template wrote the special tokens itself.
        ids = self._encode(text, "messages", special=False)
        if not ids:
            raise InvalidRequest("The model's chat template makes an empty prompt of this.", param="messages")
        return ids, self.habits.answer(ask, text)

    def _render(self, ask: Chat, template: ChatTemplate) -> str:
        return self.habits.render(ask, template)

    def _read_manner(self, ask: Complete) -> Manner:
        if ask.format is None:
            return Manner(None, None, None)
        grammar = write_grammar(ask.format)
        self.grammars.compile(grammar, "structured_outputs")
        return Manner(Guidance(grammar=grammar), None, None)

    def _read_prompt(self, prompt: str | list[int], where: str) -> list[int]:
        """A text as the model was trained to read one, or token ids taken as they are. Empty ones are refused."""
        if isinstance(prompt, str):
            ids = self._encode(prompt, "prompt", special=True) if prompt else []
        else:
            ids = check_ids(prompt, self.vocabulary, where, "prompt")
        if not ids:
            raise InvalidRequest(f"{where} is empty; give the model at least one token to continue.", param="prompt")
        return ids

    def _encode(self, text: str, param: str, *, special: bool) -> list[int]:
        # Encoding megabytes only to refuse them would let one request hold a thread for seconds.
        sure = self.tokenizer.count_at_least(text)
        if sure >= self.context:
            raise self._too_long(f"at least {sure}", param)
        return self.tokenizer.encode(text, special=special)

    def _fit(self, prompt: int, wanted: int | None, param: str) -> int:
        """How many tokens may be generated: what is wanted, within what the prompt leaves of the context."""
        room = self.context - prompt
        if room < 1:
            raise self._too_long(str(prompt), param)
        return room if wanted is None else min(wanted, room)

    def _too_long(self, prompt: str, param: str) -> ContextTooLong:
        return ContextTooLong(
            f"This model's context is {self.context} tokens and must hold the prompt and at least one more; "
            f"the prompt has {prompt} tokens. Shorten it.",
            param=param,
        )

    def _check_ask(self, ask: Chat | Complete, prompts: int) -> None:
        if not prompts:
            raise InvalidRequest("There must be at least one prompt.", param="prompt")
        if not 1 <= ask.n * prompts <= MAX_INPUTS:
            raise InvalidRequest(f"n times the number of prompts must be from 1 to {MAX_INPUTS}.", param="n")
        if ask.max_tokens is not None and ask.max_tokens < 1:
            raise InvalidRequest("max_tokens must be at least 1.", param="max_tokens")
        if ask.logprobs is not None and ask.logprobs < 0:
            raise InvalidRequest("logprobs must be at least 0.", param="logprobs")
        if any(not 1 <= len(stop) <= MAX_STOP_LENGTH for stop in ask.stop):
            raise InvalidRequest(f"A stop string has 1 to {MAX_STOP_LENGTH} characters.", param="stop")
        check_ids(ask.stop_token_ids, self.vocabulary, "stop_token_ids", "stop_token_ids")

    def _check_sampling(self, sampling: Sampling) -> Sampling:
        check_ids(list(sampling.logit_bias), self.vocabulary, "logit_bias", "logit_bias")
        return msgspec.structs.replace(sampling, top_k=min(sampling.top_k, self.vocabulary))


def choose_seeds(seed: int | None, prompts: int, n: int) -> list[int]:
    """A seed per branch. Continuation j draws like n=1 with seed + j, whatever other prompts are in the request."""
    if seed is None:
        return [secrets.randbelow(SEEDS) for _ in range(prompts * n)]
    return [(seed + j) % SEEDS for _ in range(prompts) for j in range(n)]
