"""What crosses between the front and the engine.

Events are those of a generation job: `Tokens` and `BranchEnded` per branch, `Ended(receipt)`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from polymux.core.tasks import Sampling


class Picture(msgspec.Struct):
    """One picture of the prompt, as the encoder takes it."""

    tiles: np.ndarray
    """(tiles, channels, size, size) float32, normalised."""
    starts: list[int]
    """Per tile: where its vectors begin in the prompt. The ids there stand for nothing."""


class LookWork(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Continue a prompt that holds pictures, once per seed. Everything is checked and resolved."""

    prompt: list[int]
    pictures: list[Picture]
    """In the order of the prompt."""
    max_tokens: int
    seeds: list[int]
    sampling: Sampling = Sampling()
    stop_token_ids: list[int] = []
    logprobs: int | None = None
    salt: str = ""
