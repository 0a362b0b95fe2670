"""The kernels of depth decoders against what torch computes; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/core/compute/test_triton_frames.py   (without a card)
"""

from __future__ import annotations

import os

import pytest
import torch

from polymux.core.batch.depth import draw_among

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.core.compute.triton import frames  # noqa: E402
from polymux.modalities.tts.csm import attend_place  # noqa: E402

DTYPES = {torch.float32: 2e-5, torch.float16 if INTERPRETED else torch.bfloat16: 2e-2}
"""Triton's interpreter does not multiply in bfloat16."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 128), (4, 4, 24), (2, 1, 16)])
def test_places_of_a_frame_attend_as_in_torch(heads: int, kv_heads: int, dim: int, dtype: torch.dtype) -> None:
    """Every place in turn; queries, keys and values are views of one product, as the layers give them."""
    rows, places = 5, 7
    ours = torch.full((2, rows, kv_heads, places, dim), float("nan"), dtype=dtype, device=DEVICE)
    theirs = ours.clone()
    for place in range(places):
        merged = draw(rows, heads + 2 * kv_heads, dim + place, dtype=dtype)[..., :dim].contiguous()
        query, key, value = merged.split([heads, kv_heads, kv_heads], dim=1)
        found = frames.attend_place(query, key, value, ours, place, 0.2)
        expected = attend_place(query, key, value, theirs, place, 0.2)
        torch.testing.assert_close(found, expected, atol=DTYPES[dtype], rtol=DTYPES[dtype])
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("top_k", [0, 1, 50, 5000])
@pytest.mark.parametrize("width", [19, 2051])
def test_codes_are_drawn_as_in_torch(width: int, top_k: int) -> None:
    """Greedy rows, cold and hot ones; the sums are taken in another order, so a number in a few may fall elsewhere."""
    rows = 64
    logits = 3 * draw(rows, width)
    logits[1] = float("-inf")
    logits[1, 3] = 0.0
    temperatures = torch.tensor([0.0, 1.0, 0.3, 2.0], device=DEVICE).repeat(rows // 4)
    uniform = torch.rand(rows, 3, generator=torch.Generator().manual_seed(1)).to(DEVICE)[:, 1]
    found = frames.draw_place(logits, temperatures, uniform, top_k)
    expected = draw_among(logits, temperatures, uniform, top_k)
    assert (found == expected).float().mean() > 0.95
    assert torch.equal(found[::4], expected[::4])
    assert found[1] == 3


def test_only_the_likeliest_and_their_ties_are_drawn() -> None:
    logits = torch.tensor([[0.0, 5.0, 5.0, 6.0, 1.0]], device=DEVICE).repeat(200, 1)
    temperatures = torch.full((200,), 4.0, device=DEVICE)
    uniform = torch.linspace(0, 1 - 2**-24, 200, device=DEVICE)
    drawn = frames.draw_place(logits, temperatures, uniform, 2)
    assert set(drawn.tolist()) == {1, 2, 3}


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_what_is_drawn_of_broken_logits_can_be_looked_up(temperature: float, top_k: int) -> None:
    """An id behind the codebook would be the end of the process, for every stream, at the next lookup."""
    logits = torch.full((1, 19), float("nan"), device=DEVICE)
    told = torch.full((1,), temperature, device=DEVICE), torch.full((1,), 0.999, device=DEVICE)
    assert 0 <= frames.draw_place(logits, *told, top_k).item() < 19
