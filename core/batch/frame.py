"""The frame of a recorded launch: pieces of prompts beside single tokens, in one buffer whose layout is fixed.

Every index that kernels read stands in it; what a plan does not fill is padding: tokens at place -1 of a slot that no
row has, rows of no tokens, draws that nobody reads. So one recording serves every plan that fits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np
from torch import Tensor

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.compute.attention import RowBounds

ON_DEVICE = -1
"""In place of an id: the row's newest token, which the host has not seen yet."""


@dataclass(frozen=True, order=True)
class Frame:
    """What a launch may have at most: `tokens` in all, of `singles` rows that bring one (at the front), and of `chunks`
    rows that bring several. No more singles than tokens."""

    tokens: int
    singles: int
    chunks: int

    @property
    def rows(self) -> int:
        return self.singles + self.chunks

    @cached_property
    def parts(self) -> dict[str, int]:
        """Numbers of each part of the buffer, in order."""
        return {
            "ids": self.tokens,
            "positions": self.tokens,
            "token_slots": self.tokens,
            "slots": self.rows,
            "starts": self.rows + 1,
            "lengths": self.rows,
            "sampled": self.rows,
            "finals": self.rows,
            "drawn_slots": self.rows,
            "drawn_places": self.rows,
        }

    @cached_property
    def size(self) -> int:
        return sum(self.parts.values())

    @property
    def bounds(self) -> RowBounds:
        return RowBounds(self.singles, self.tokens)

    @classmethod
    def around(cls, plan: Plan) -> Frame:
        """The one that a plan fills."""
        singles = sum(grant.count == 1 for grant in plan.grants)
        return cls(plan.units, singles, len(plan.grants) - singles)

    def holds(self, other: Frame) -> bool:
        return other.tokens <= self.tokens and other.singles <= self.singles and other.chunks <= self.chunks

    def split(self, buffer: Tensor) -> dict[str, Tensor]:
        """Views of the parts of a buffer (size,)."""
        return dict(zip(self.parts, buffer.split(list(self.parts.values()))))

    def fill(self, grants: Sequence[Grant], padding: int) -> np.ndarray:
        """(size,) int64: the buffer of a launch. Single tokens come first among the `grants`; `padding` is a slot that
        no row has."""
        buffer = np.zeros(self.size, np.int64)
        part = dict(zip(self.parts, np.split(buffer, list(accumulate(self.parts.values()))[:-1])))
        for name in ("token_slots", "slots", "drawn_slots"):
            part[name].fill(padding)
        part["positions"].fill(-1)
        rows = [token_row(grant.row) for grant in grants]
        ids = [id for grant, row in zip(grants, rows) for id in list_ids(grant, row)]
        counts = np.array([grant.count for grant in grants], np.int64)
        slots = np.array([row.slot for row in rows], np.int64)
        lengths = np.array([grant.start for grant in grants], np.int64) + counts
        ends = counts.cumsum()
        tokens, singles = len(ids), int((counts == 1).sum())
        part["ids"][:tokens] = ids
        part["positions"][:tokens] = np.arange(tokens) + np.repeat(lengths - ends, counts)
        part["token_slots"][:tokens] = np.repeat(slots, counts)
        places = np.arange(len(grants))
        places[singles:] += self.singles - singles
        part["slots"][places] = slots
        part["lengths"][places] = lengths
        part["starts"].fill(tokens)
        part["starts"][: self.singles] = singles
        part["starts"][places] = ends - counts
        finals = [place for place, grant in enumerate(grants) if grant.final]
        part["sampled"][: len(finals)] = ends[finals] - 1
        part["finals"][: len(finals)] = places[finals]
        part["drawn_slots"][: len(finals)] = slots[finals]
        part["drawn_places"][: len(finals)] = lengths[finals]
        return buffer


def list_ids(grant: Grant, row: TokenRow) -> list[int]:
    """Ids of a grant's tokens, as far as the host knows them."""
    end = grant.start + grant.count
    ids = row.tokens[grant.start : end]
    return [*ids, *grant.guesses] if grant.guesses else ids + [ON_DEVICE] * (end > len(row.tokens))


def fits_frames(grant: Grant, row: TokenRow, units: bool) -> bool:
    """Whether ids and places say all about a grant: no picture, no adapter, no guesses, no scores. With `units`, also
    that its tokens' further ids lie on the device."""
    request = row.request
    if grant.guesses or row.foresight is not None or row.adapter is not None or request.scores is not None:
        return False
    if grant.start < row.prompt_length and (request.inlays or request.positions is not None):
        return False
    continued = grant.count == 1 and grant.start >= row.resumed
    return not units or continued or grant.start + grant.count <= row.prompt_length


TOKENS = (64, *range(128, 2049, 128))
"""Sizes of frames: whole tiles of the libraries' products, up to where a card takes longer than the host."""

SINGLES = 64
"""Streams of the narrow frames; the wide ones hold all rows of a stage."""

CHUNKS = 32
"""Rows that bring several tokens: one that is not there costs next to nothing."""


def list_frames(max_units: int, max_rows: int) -> tuple[list[Frame], list[Frame]]:
    """The frames of a stage, those with most rows first: those that are wanted before the first request, and others."""
    sizes = [size for size in TOKENS if size <= max_units]
    narrow = [Frame(size, min(size, SINGLES, max_rows), min(CHUNKS, max_rows)) for size in sizes]
    wide = [Frame(size, min(size, max_rows), min(CHUNKS, max_rows)) for size in sizes]
    few = {frame for frame in narrow if frame.tokens <= 1024} | {
        frame for frame in wide if frame.tokens in (256, 512, 768, 1024)
    }
    order = sorted({*narrow, *wide}, key=lambda frame: (frame.rows, frame.tokens), reverse=True)
    return [frame for frame in order if frame in few], [frame for frame in order if frame not in few]
