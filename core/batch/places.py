"""Where tokens of a launch stand: pictures in place of some, and positions that are not a token's place in its row."""

from __future__ import annotations

import numpy as np

from polymux.core.batch.plan import Grant, Plan
from polymux.core.batch.sequence import TokenRow, token_row


def place_inlays(row: TokenRow, base: int, start: int, end: int, units: int) -> list[np.ndarray]:
    """Per picture that the row's tokens from `start` to `end` reach: (place in the batch, block, vector of it) of each
    place, flat. `base` is where the tokens stand in the batch, `units` the vectors of a block."""
    found = []
    for inlay in row.request.inlays:
        first, last = max(inlay.start, start), min(inlay.start + inlay.count, end)
        if first < last:
            places = np.arange(first, last)
            vectors = places - inlay.start + inlay.offset
            blocks = np.asarray(row.reads[0].blocks)[inlay.block + vectors // units]
            found.append(np.stack([places - start + base, blocks, vectors % units], axis=1).ravel())
    return found


def turn_tokens(plan: Plan, axes: int) -> np.ndarray | list[int]:
    """The positions of a launch's tokens where they are not their places: (axes, T), or (1, T) when all axes agree,
    flat; empty when the places will do."""
    moved = [grant for grant in plan.grants if token_row(grant.row).request.positions is not None]
    if not moved:
        return []
    same = all(grant.start >= token_row(grant.row).prompt_length for grant in moved)
    return np.concatenate([_turn(grant, 1 if same else axes) for grant in plan.grants], axis=1).ravel()


def _turn(grant: Grant, axes: int) -> np.ndarray:
    """(axes, count): where a grant's tokens stand."""
    row, end = token_row(grant.row), grant.start + grant.count
    given = row.request.positions
    places = np.arange(grant.start, end) + row.request.shift
    positions = np.broadcast_to(places, (axes, len(places)))
    if given is None or grant.start >= row.prompt_length:
        return positions
    return np.concatenate(
        [given[:, grant.start : end], positions[:, max(row.prompt_length - grant.start, 0) :]], axis=1
    )
