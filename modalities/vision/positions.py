"""Where tokens stand when pictures stand in time, height and width (Wang et al. 2024, Qwen2-VL, section 2.1)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Grid:
    """A picture's places in a prompt: from `start` on, frame by frame, row by row."""

    start: int
    frames: int
    height: int
    width: int
    interval: float = 1.0
    """Positions from one frame to the next."""

    @property
    def count(self) -> int:
        return self.frames * self.height * self.width


def place_tokens(length: int, grids: Iterable[Grid]) -> np.ndarray:
    """(3, length) int64: time, height and width of every token of a prompt. Text advances all three together; a
    picture's tokens start where the text before it ended, and the text behind it after its longer side."""
    positions = np.empty((3, length), np.int64)
    told = place = 0
    for grid in grids:
        text = grid.start - told
        positions[:, told : grid.start] = np.arange(place, place + text)
        place += text
        frame, row, column = np.indices((grid.frames, grid.height, grid.width)).reshape(3, -1)
        told = grid.start + grid.count
        positions[:, grid.start : told] = np.stack([(frame * grid.interval).astype(np.int64), row, column]) + place
        place += max(grid.height, grid.width)
    positions[:, told:] = np.arange(place, place + length - told)
    return positions
