"""Fields of chat and completions that say how tokens are drawn and when to stop."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, Tag, field_validator

from polymux.core.errors import InvalidRequest
from polymux.core.tasks import Format, Sampling
from polymux.gateway.schemas.base import MAX_INT, Seed, TokenId, WireRequest, by_type, choose, only
from polymux.gateway.schemas.formats import ResponseFormat, StructuredOutputs

NonEmpty = Annotated[str, Field(min_length=1)]


Stop = Annotated[
    Annotated[NonEmpty, Tag("<one>")] | Annotated[list[NonEmpty], Field(max_length=16), Tag("<many>")],
    choose(by_type({str: "<one>", list: "<many>"}), "a string or a list of strings"),
]


class StreamOptions(WireRequest):
    include_usage: bool | None = Field(None, description="Send usage in one last chunk whose `choices` are empty.")
    include_obfuscation: Annotated[bool | None, only(False)] = None


class SamplingFields(WireRequest):
    temperature: float | None = Field(None, ge=0, le=2, description="0: the likeliest token, always.")
    top_p: float | None = Field(None, gt=0, le=1)
    n: int | None = Field(None, ge=1, le=128, description="Choices per prompt.")
    stop: Stop | None = Field(None, description="The text ends before the first of these; up to 16.")
    seed: Seed | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = Field(
        None, max_length=1024, description="Token id -> what is added to its logit."
    )
    stream: bool | None = None
    stream_options: StreamOptions | None = Field(None, description="With `stream` only.")
    user: str | None = Field(None, description="Accepted; changes nothing.")
    metadata: dict[str, str] | None = Field(None, description="Accepted; changes nothing.")
    service_tier: str | None = Field(None, description="Accepted; changes nothing: there is one tier.")
    top_k: int | None = Field(None, ge=-1, le=MAX_INT, description="Extension. 0 or -1: off.")
    min_p: float | None = Field(None, ge=0, le=1, description="Extension.")
    repetition_penalty: float | None = Field(None, gt=0, le=10, description="Extension. 1: off.")
    ignore_eos: bool | None = Field(None, description="Extension. Go on to `max_tokens`.")
    stop_token_ids: list[TokenId] | None = Field(None, max_length=128, description="Extension.")
    structured_outputs: StructuredOutputs | None = Field(None, description="Extension. What the text must look like.")

    @field_validator("logit_bias")
    @classmethod
    def _keys_are_token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        for key in value or ():
            if not (key.isascii() and key.isdigit() and int(key[:20]) <= MAX_INT):
                raise ValueError(f"keys must be token ids, not {key[:40]!r}")
        return value

    def sampling(self) -> Sampling:
        return Sampling(
            temperature=_or(self.temperature, 1.0),
            top_p=_or(self.top_p, 1.0),
            top_k=max(0, self.top_k or 0),
            min_p=self.min_p or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_or(self.repetition_penalty, 1.0),
            logit_bias={int(key): bias for key, bias in (self.logit_bias or {}).items()},
            seed=self.seed,
        )

    def format(self, response: ResponseFormat | None = None) -> Format | None:
        """Raises `InvalidRequest` for more than one format."""
        formats = [each.format() for each in (response, self.structured_outputs) if each is not None]
        wanted = [each for each in formats if each is not None]
        if len(wanted) > 1:
            raise InvalidRequest(
                "'response_format' and 'structured_outputs' exclude each other",
                param="structured_outputs",
                code="invalid_value",
            )
        return wanted[0] if wanted else None

    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else list(self.stop or ())

    @property
    def wants_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


def _or(value: float | None, default: float) -> float:
    return default if value is None else value
