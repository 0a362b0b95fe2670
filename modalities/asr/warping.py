"""When each token is said: the cheapest way through how much it was heard where (dynamic time warping, Sakoe 1978)."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from polymux.core.batch.oneshot import OneShotModel, OneShotStage
from polymux.core.engine.site import Site


class Warper(OneShotModel):
    """(rows, frames) arrays in, for each the first frame of every row out. Runs on the host."""

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[np.ndarray]:
        return [warp(item) for item in items]


def open_warping(site: Site) -> OneShotStage:
    return OneShotStage("warp", Warper(), site, max_units=8, on_host=True)


def warp(weights: np.ndarray) -> np.ndarray:
    """The frame, (rows,) int64, at which each row of `weights` (rows, frames) begins: the first row at 0, none before
    the one above it, and what lies on the way is as large in sum as can be."""
    costs = -weights.astype(np.float64)
    rows, frames = costs.shape
    totals = np.empty((rows, frames))
    for row in range(rows):
        along = costs[row].cumsum()
        if row == 0:
            totals[0] = along
            continue
        above = totals[row - 1]
        entered = np.minimum(above, np.concatenate([[np.inf], above[:-1]]))
        # to go on in a row costs what lies between: the best entry so far, minus what was passed before it
        totals[row] = along + np.minimum.accumulate(entered - (along - costs[row]))
    return trace(totals)


def trace(totals: np.ndarray) -> np.ndarray:
    """Back from the last cell, always to the cheapest of the three that lead to it."""
    row, frame = totals.shape[0] - 1, totals.shape[1] - 1
    begins = np.zeros(totals.shape[0], np.int64)
    while row:
        if not frame:
            row -= 1
            continue
        diagonal, above, before = totals[row - 1, frame - 1], totals[row - 1, frame], totals[row, frame - 1]
        if before < diagonal and before < above:
            frame -= 1
            continue
        begins[row] = frame
        row -= 1
        if diagonal <= above:
            frame -= 1
    return begins
