"""Whisper's rules for timestamps (Radford et al. 2022, section 2.3, as its authors' decoder applies them)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from polymux.core.compute.rules import Choose, LogitRule, Suppress, SuppressFirst

NONE = -1
"""In place of a token that was not generated."""


class Timestamps(LogitRule):
    """The first token is a timestamp of at most `latest`; they come in pairs, except before the end; they never go
    back; and where all timestamps together are likelier than any text token, one of them is taken."""

    width = 3
    """The last token, the one before it, and the last timestamp; `NONE` where there is none."""

    def __init__(self, first: int, end: int, no_timestamps: int, latest: int | None) -> None:
        """`first` is the id of <|0.00|>, and all ids from there on are timestamps; `latest` counts from it."""
        self._first = first
        self._end = end
        self._no_timestamps = no_timestamps
        self._latest = latest

    def begin(self) -> Sequence[int]:
        return (NONE, NONE, NONE)

    def fuse(self, before: Sequence[LogitRule], vocabulary: int, device: torch.device) -> Choose | None:
        if device.type != "cuda" or [type(rule) for rule in before] != [SuppressFirst, Suppress]:
            return None
        from polymux.modalities.asr.choosing import WhisperChoice

        first, always = (rule.ids for rule in before if isinstance(rule, Suppress))
        return WhisperChoice(
            vocabulary, first, always, self._first, self._end, self._no_timestamps, self._latest, device
        )

    def apply(self, logits: Tensor, states: Tensor) -> Tensor:
        last, before, stamp = (column[:, None] for column in states.unbind(dim=1))
        ids = torch.arange(logits.shape[1], device=logits.device)[None]
        stamps = ids >= self._first
        after_stamp = last >= self._first
        # what has one token or none before it counts as if a timestamp had come first
        paired = (before == NONE) | (before >= self._first)
        opened = after_stamp & ~paired
        floor = torch.where(stamp == NONE, self._first, torch.where(opened, stamp, stamp + 1))
        banned = ids == self._no_timestamps
        banned = banned | (stamps & after_stamp & paired)
        banned = banned | ((ids < self._end) & opened)
        banned = banned | (stamps & (ids < floor))
        start = last == NONE
        banned = banned | (start & ~stamps)
        if self._latest is not None:
            banned = banned | (start & (ids > self._first + self._latest))
        logits = logits.masked_fill(banned, float("-inf"))
        logprobs = logits.log_softmax(dim=-1)
        together = logprobs[:, self._first :].logsumexp(dim=-1, keepdim=True)
        best = logprobs[:, : self._first].amax(dim=-1, keepdim=True)
        return logits.masked_fill(~stamps & (together > best), float("-inf"))

    def advance(self, states: Tensor, tokens: Tensor) -> Tensor:
        stamp = torch.where(tokens >= self._first, tokens, states[:, 2])
        return torch.stack([tokens, states[:, 0], stamp], dim=1)
