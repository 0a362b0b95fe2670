"""What a request consumed, and where its time went."""

from __future__ import annotations

from typing import Literal

from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.schemas.base import WireAnswer


class PromptTokensDetails(WireAnswer):
    cached_tokens: int


class CompletionTokensDetails(WireAnswer):
    reasoning_tokens: int


class TokenUsage(WireAnswer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> TokenUsage:
        return cls(
            prompt_tokens=usage.input_tokens,
            completion_tokens=usage.output_tokens,
            total_tokens=usage.input_tokens + usage.output_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=usage.cached_tokens),
            completion_tokens_details=CompletionTokensDetails(reasoning_tokens=usage.reasoning_tokens),
        )


class InputUsage(WireAnswer):
    prompt_tokens: int
    total_tokens: int


class ReceiptBody(WireAnswer):
    """Extension: where the time and the bytes went. Times in milliseconds."""

    queued_ms: float
    first_ms: float
    total_ms: float
    input_units: int
    output_units: int
    cached_units: int
    launches: int
    preemptions: int
    encoder_hits: int
    steps_run: int
    steps_skipped: int
    guessed_units: int
    accepted_units: int
    sound_seconds: float
    real_time_factor: float

    @classmethod
    def of(cls, receipt: Receipt) -> ReceiptBody:
        return cls(**{name: round(getattr(receipt, name), 3) for name in cls.model_fields})


class ReceiptEntry(WireAnswer):
    model: str
    task: str
    receipt: ReceiptBody


class ReceiptList(WireAnswer):
    """One for each answer that has ended, in that order."""

    object: Literal["list"] = "list"
    data: list[ReceiptEntry]
