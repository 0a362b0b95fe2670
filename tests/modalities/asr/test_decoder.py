"""The decoder's attention through our own kernels against the reference; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/modalities/asr/test_decoder.py   (without a card)
"""

from __future__ import annotations

import copy
import os

import pytest
import torch

from polymux.core.compute.attention import AttentionBackend, PagedBatch, PagedContext
from polymux.core.compute.sdpa import SdpaAttention
from polymux.modalities.asr.decoder import WhisperDecoder
from polymux.modalities.asr.whisper import split_whisper

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.core.compute.triton.attention import TritonAttention  # noqa: E402


def pack(decoder: WhisperDecoder, backend: AttentionBackend) -> PagedContext:
    """Three rows that bring one token each: at their places 5 and 2, and one of padding."""
    cache = torch.zeros(8, 3, 2, 4, decoder.heads, decoder.shape.head_dim, device=DEVICE)
    generator = torch.Generator().manual_seed(0)
    cache[:, :, :, :3] = torch.randn(cache[:, :, :, :3].shape, generator=generator).to(DEVICE)
    frames = decoder.slab.units
    slabs = torch.randn(2, 3, 2, frames, decoder.heads, decoder.shape.head_dim, generator=generator).to(DEVICE)
    slots, positions = torch.tensor([0, 1, 2], device=DEVICE), torch.tensor([5, 2, -1], device=DEVICE)
    tables = torch.tensor([[1, 2], [3, 0], [0, 0]], device=DEVICE)
    batch = PagedBatch(
        [0, 1, 2, 3],
        [6, 3, 0],
        4,
        tables,
        slots,
        torch.arange(4, device=DEVICE),
        positions + 1,
        slots,
        positions,
        slabs=[1, 0, 0],
        slab_table=torch.tensor([[1], [0], [0]], device=DEVICE),
    )
    return PagedContext(backend, cache, batch, slabs)


def test_a_step_attends_and_writes_like_the_reference(whisper: torch.nn.Module) -> None:
    _, decoder = split_whisper(copy.deepcopy(whisper).to(DEVICE))
    decoder.start_still(torch.device(DEVICE))
    merged = torch.randn(3, 3 * decoder.heads, decoder.shape.head_dim, generator=torch.Generator().manual_seed(1))
    merged = merged.to(DEVICE)
    ours, exact = pack(decoder, TritonAttention()), pack(decoder, SdpaAttention())
    found, wanted = decoder._attend(1, merged.clone(), ours), decoder._attend(1, merged.clone(), exact)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.cache[1:4], exact.cache[1:4])
    query = merged[:, : decoder.heads].contiguous()
    crossed = [context.attend_slab(1, query, decoder._cross_options) for context in (ours, exact)]
    torch.testing.assert_close(crossed[0][:2], crossed[1][:2], rtol=1e-4, atol=1e-4)
