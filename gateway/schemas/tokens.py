"""`POST /tokenize` and `POST /detokenize`: the requests and the answers."""

from __future__ import annotations

from pydantic import Field, model_validator

from polymux.core.tasks import Chat, Detokenize, Tokenize
from polymux.gateway.schemas.base import WireAnswer, WireRequest, maybe
from polymux.gateway.schemas.chat import Message, Scalar
from polymux.gateway.schemas.completions import TokenIds
from polymux.gateway.schemas.tools import ToolDefinition


class TokenizeRequest(WireRequest):
    """Either a text or a conversation."""

    model: str
    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=4096)
    tools: list[ToolDefinition] | None = Field(None, max_length=128, description="With `messages` only.")
    chat_template_kwargs: dict[str, Scalar] | None = Field(None, max_length=32, description="With `messages` only.")
    add_special_tokens: bool | None = Field(None, description="Of a text; default true.")
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> TokenizeRequest:
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("needs either a prompt or messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs go with messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise ValueError("add_special_tokens goes with a prompt: a chat template writes its own")
        return self

    def ask(self) -> Tokenize:
        if self.messages is None:
            return Tokenize(text=self.prompt or "", special=self.add_special_tokens is not False)
        chat = Chat(
            messages=[message.plain() for message in self.messages],
            tools=[tool.plain() for tool in self.tools] if self.tools else None,
            template_options=dict(self.chat_template_kwargs or {}),
        )
        return Tokenize(chat=chat)


class TokenizeAnswer(WireAnswer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = maybe()


class DetokenizeRequest(WireRequest):
    model: str
    tokens: TokenIds

    def ask(self) -> Detokenize:
        return Detokenize(ids=self.tokens)


class DetokenizeAnswer(WireAnswer):
    prompt: str
