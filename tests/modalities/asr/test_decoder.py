"""The decoder's attention through our own kernels against the reference; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/modalities/asr/test_decoder.py   (without a card)
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from polymux.core.batch.tokens import TokenBatch
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

from polymux.core.compute.triton import single  # noqa: E402
from polymux.core.compute.triton.attention import TritonAttention  # noqa: E402
from polymux.core.compute.triton.linear import CudaLinear  # noqa: E402
from polymux.core.compute.triton.single import PROGRAMS, attend_slab, count_arrivals  # noqa: E402
from polymux.core.compute.triton.slabs import Dealer  # noqa: E402


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


@pytest.mark.parametrize("many", [False, True])
def test_a_step_attends_and_writes_like_the_reference(
    whisper: torch.nn.Module, monkeypatch: pytest.MonkeyPatch, many: bool
) -> None:
    """Also in the small programs of many rows, which look at a row in several stretches."""
    if many:
        monkeypatch.setattr(single, "PROGRAMS", 0)
        monkeypatch.setattr(single, "MANY_TILE", 2)
    _, decoder = split_whisper(copy.deepcopy(whisper).to(DEVICE))
    decoder.start_still(torch.device(DEVICE))
    width = decoder.heads * decoder.shape.head_dim
    merged = torch.randn(3, 3 * width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ours, exact = pack(decoder, TritonAttention()), pack(decoder, SdpaAttention())
    found, wanted = decoder._attend(1, merged.clone(), ours), decoder._attend(1, merged.clone(), exact)
    torch.testing.assert_close(found[:2], wanted[:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(ours.cache[1:4], exact.cache[1:4])
    crossed = [decoder._cross(1, merged[:, :width].contiguous(), context) for context in (ours, exact)]
    torch.testing.assert_close(crossed[0][:2], crossed[1][:2], rtol=1e-4, atol=1e-4)


def test_few_tokens_are_computed_like_many(whisper: torch.nn.Module) -> None:
    """Norms, GELU and sums inside of the products, attention in one kernel each."""
    model = copy.deepcopy(whisper).to(DEVICE)
    decoders = [split_whisper(model, make)[1] for make in (CudaLinear, None)]
    decoders[0].start_still(torch.device(DEVICE))
    assert decoders[0]._few
    states, caches = [], []
    for decoder, backend in zip(decoders, (TritonAttention(), SdpaAttention())):
        decoder._few = decoder._few if decoder is decoders[0] else 0
        context = pack(decoder, backend)
        positions = context.batch.positions.clamp(min=0)
        ids = torch.tensor([7, 3, 0], device=DEVICE)
        states.append(decoder.run(TokenBatch(ids, positions, positions, positions, context)))
        caches.append(context.cache[1:4])
    torch.testing.assert_close(states[0][:2], states[1][:2], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(caches[0], caches[1], rtol=1e-4, atol=1e-4)


def test_long_slabs_are_joined_by_whoever_ends_last() -> None:
    """Stretches of uneven numbers of frames, and counters that are left as they were found."""
    generator = torch.Generator().manual_seed(2)
    slabs = torch.randn(3, 2, 333, 4, 24, generator=generator).to(DEVICE)
    query = torch.randn(5, 4, 24, generator=generator).to(DEVICE)
    slots = torch.tensor([0, 2, 1, 1, 2], device=DEVICE)
    for _ in range(2):
        found = attend_slab(query, slabs, slots, 0.3)
        chosen = slabs[slots]
        scores = torch.einsum("thd,tfhd->thf", query, chosen[:, 0]) * 0.3
        exact = torch.einsum("thf,tfhd->thd", scores.softmax(dim=-1), chosen[:, 1])
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-4)
    assert not count_arrivals(query.device, PROGRAMS).any()


def test_a_layer_of_all_slabs_is_written_in_one_launch() -> None:
    """In any order, between others that stay as they are; slabs that do not lie so are told apart."""
    arena = torch.zeros(5, 3, 2, 13, 4, 24, device=DEVICE)
    projected = torch.randn(2, 13, 2 * 4 * 24, generator=torch.Generator().manual_seed(4)).to(DEVICE)
    slabs = [arena[3], arena[1]]
    assert Dealer.fits(slabs)
    Dealer(slabs).deal(projected, 2)
    wanted = torch.zeros_like(arena)
    for slab, each in zip((3, 1), projected.unflatten(-1, (2, 4, 24)).transpose(1, 2)):
        wanted[slab, 2] = each
    assert torch.equal(arena, wanted)
    assert not Dealer.fits([arena[3], torch.zeros_like(arena[0])])
    assert not Dealer.fits([arena[3].transpose(2, 3)])


def test_tokens_of_a_row_share_the_reading_of_its_slab(whisper: torch.nn.Module) -> None:
    """With heads of 16: narrower ones are refused, a card multiplies no smaller tiles."""
    config = copy.deepcopy(whisper.config)
    config.decoder_attention_heads = 2
    _, decoder = split_whisper(type(whisper)(config).to(DEVICE))
    assert TritonAttention().refuses(torch.device("cuda"), torch.float32, decoder.shape.head_dim) is None
    width, count = decoder.heads * decoder.shape.head_dim, 3
    query = torch.randn(2 * count, width, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    found = []
    for backend in (TritonAttention(), SdpaAttention()):
        context = pack(decoder, backend)
        slots = context.batch.slots[:2]
        context.batch = replace(
            context.batch,
            starts=[0, count, 2 * count],
            lengths=[6, 3],
            slots=slots,
            token_slots=slots.repeat_interleave(count),
            slabs=[1, 0],
            memo={},
        )
        found.append(decoder._cross(2, query, context))
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-4)
