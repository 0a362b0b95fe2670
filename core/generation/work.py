"""What crosses from the front to the engine, and the one answer of ours that crosses back.

Events of a generation job, in order: `PromptScores` of a prompt (when asked) before the first `Tokens` of its
branches; `Tokens` per branch; `BranchEnded(branch, reason)` with reason stop or length; `Ended(receipt)`.
Branch `i * n + j` is continuation j of prompt i.
"""

from __future__ import annotations

import msgspec

from polymux.core.tasks import Sampling

SCORES = "scores"
"""The `kind` of the `Output` that carries `PromptScores`."""


class Thought(msgspec.Struct, kw_only=True, omit_defaults=True):
    """How the model thinks before it answers: between two marks, each one token."""

    begin: int
    end: int
    inside: bool = False
    """The prompt has already opened the thought."""
    budget: int | None = None
    """Tokens after which the thought is closed."""


class Guidance(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What every answer must look like."""

    grammar: str | None = None
    """As `core.text.grammar` writes it; it speaks of the answer, not of the thought before it."""
    thought: Thought | None = None


class GenerateWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Continue every prompt `n` times. Everything is checked and resolved: nothing here can be out of range.

    A generated stop token is the last id of its branch's `Tokens`, counted like the others.
    """

    prompts: list[list[int]]
    """Token ids, never empty, each in [0, vocabulary size)."""
    max_tokens: list[int]
    """Per prompt: at most so many new tokens, at least 1; prompt and answer fit the context."""
    seeds: list[int]
    """Per branch, in [0, 2**63): the draw depends on (seed, position) alone. Takes the place of `sampling.seed`."""
    n: int = 1
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    """Ends a branch with reason stop. Holds the model's end-of-sequence ids unless they are to be ignored."""
    logprobs: int | None = None
    """None: off. k >= 0: the chosen token's logprob and the k best alternatives, k within the vocabulary."""
    guidance: Guidance | None = None
    score_prompts: bool = False
    """Emit `PromptScores` for every prompt; only with `logprobs`. A program that cannot raises `InvalidRequest`."""
    adapter: str | None = None
    """The name of the adapter that changes the model for this job."""
    salt: str = ""
    """Prefixes are shared only between jobs of equal salt."""


class PromptScores(msgspec.Struct, array_like=True):
    """How likely the model found prompt `prompt`: entry i belongs to its token i + 1 (the first has no score)."""

    prompt: int
    logprobs: list[float]
    top: list[list[tuple[int, float]]]
