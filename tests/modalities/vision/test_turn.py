"""The kernel that turns an encoder's queries and keys, where there is a card."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from polymux.modalities.vision.patches import turn_plainly


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "dim"), [(16, 64), (5, 80), (3, 24)])
def test_turning_in_place(heads: int, dim: int) -> None:
    from polymux.core.compute.triton.turn import turn

    torch.manual_seed(0)
    merged = torch.randn(33, 3, heads, dim, device="cuda")
    cosines, sines = torch.randn(2, 33, dim, device="cuda")
    expected = merged.clone()
    turn_plainly(expected, cosines, sines)
    turn(merged, cosines, sines)
    assert_close(merged, expected)
