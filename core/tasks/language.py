"""Text: conversations and texts to continue, and what is told of them while they grow."""

from __future__ import annotations

from typing import Any

import msgspec

from polymux.core.tasks.answers import Done
from polymux.core.vocabulary import Task


class Sampling(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a token is drawn. The draw of a row depends only on (seed, position), never on its neighbours."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0: off."""
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    seed: int | None = None


class Format(msgspec.Struct, frozen=True):
    """What an answer must look like. `kind`: schema, regex, choice (a list of texts) or grammar (Lark or GBNF)."""

    kind: str
    value: Any


class Chat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A conversation to continue. `messages` are OpenAI-shaped, validated by the gateway."""

    messages: list[dict[str, Any]]
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = None
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    """None: off. k >= 0: the chosen token's logprob and the k best alternatives."""
    tools: list[dict[str, Any]] | None = None
    tool_choice: str = "auto"
    """auto, none, required: call at least one."""
    tool: str | None = None
    """The one tool to call, whatever `tool_choice` says."""
    parallel_calls: bool = True
    """Whether one answer may call several tools."""
    template_options: dict[str, Any] = {}
    format: Format | None = None
    """What the answer must look like; a thought before it is free."""
    effort: str | None = None
    """How much to think: none, minimal, low, medium, high, xhigh. None: as the model does by itself."""
    thought_budget: int | None = None
    """Tokens after which a thought is closed."""


class Complete(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Texts or token ids to continue. Choice i*n + j is continuation j of prompt i."""

    prompts: list[str | list[int]]
    sampling: Sampling = Sampling()
    n: int = 1
    max_tokens: int | None = 16
    stop: list[str] = []
    stop_token_ids: list[int] = []
    ignore_eos: bool = False
    logprobs: int | None = None
    echo: bool = False
    format: Format | None = None


class TokenLogprob(msgspec.Struct, omit_defaults=True):
    """One token as the user reads it. `data` are its bytes (a token may end inside a character)."""

    token: str
    logprob: float
    data: bytes = b""
    top: list[TokenLogprob] = []


class TextDelta(msgspec.Struct, omit_defaults=True):
    """New text of choice `index`; deltas joined equal the unary text. `tokens` counts the tokens behind it."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class ThoughtDelta(msgspec.Struct, omit_defaults=True):
    """More of what choice `index` thinks before it answers."""

    index: int
    text: str
    logprobs: list[TokenLogprob] | None = None


class CallDelta(msgspec.Struct, omit_defaults=True):
    """Choice `index` calls a tool, its `call`-th: first `id` and `name`, once, then JSON `arguments` in pieces."""

    index: int
    call: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None
    logprobs: list[TokenLogprob] | None = None


class ChoiceEnded(msgspec.Struct):
    """Choice `index` is complete. `reason`: stop, length, tool_calls or content_filter."""

    index: int
    reason: str
    stop: str | None = None
    """The stop string that ended it."""


class Tokenize(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A text, or a conversation as the model's template writes it, to spell in the model's tokens."""

    text: str = ""
    chat: Chat | None = None
    special: bool = True
    """Add what the tokenizer adds to a text of its own (BOS, [CLS])."""


class Tokenized(msgspec.Struct):
    """Token ids and what each is called; `longest` is how many the model reads."""

    ids: list[int]
    names: list[str]
    longest: int


class Detokenize(msgspec.Struct):
    """Token ids to read as text."""

    ids: list[int]


class Detokenized(msgspec.Struct):
    text: str


CHAT = Task("chat", Chat, (TextDelta, ThoughtDelta, CallDelta, ChoiceEnded, Done))
COMPLETE = Task("complete", Complete, (TextDelta, ChoiceEnded, Done))
TOKENIZE = Task("tokenize", Tokenize, (Tokenized, Done))
DETOKENIZE = Task("detokenize", Detokenize, (Detokenized, Done))
