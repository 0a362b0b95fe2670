"""Whatever a launch is, its kernels are compiled before the first request: nobody's answer waits for a compiler.

The kernels are specialised for a card that is not there (`core.testing.card`); nothing is run.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import pytest
import torch
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, Qwen3Config, Qwen3ForCausalLM

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

from polymux.core.batch.frame import Frame, list_frames
from polymux.core.batch.packing import SHARED_TOKENS
from polymux.core.batch.tokens import TokenBatch, TokenStage
from polymux.core.batch.warming import list_mixed
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.drawer import SlotDrawer
from polymux.core.compute.fast import FastDecoder, accelerate, build
from polymux.core.compute.graphs import size_ladder
from polymux.core.compute.triton.ahead import compiling_ahead
from polymux.core.compute.triton.attention import TritonAttention
from polymux.core.compute.triton.operations import TritonOperations
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.card import Card, pretend_card

ROWS, UNITS = 256, 1024

COMMON = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "max_position_embeddings": 4096,
}


def qwen3() -> torch.nn.Module:
    """The heads of Qwen3-8B."""
    return Qwen3ForCausalLM(Qwen3Config(**COMMON, num_attention_heads=32, num_key_value_heads=8, head_dim=128))


def gemma3() -> torch.nn.Module:
    """The heads of Gemma-3-4B, a layer with a window and one without."""
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **{**COMMON, "num_hidden_layers": 2},
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=256,
            sliding_window=512,
            layer_types=kinds,
        )
    )


class Anywhere(TritonAttention):
    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        return None


class Blind(SlotDrawer):
    """Draws nothing: what is in memory is no token."""

    def draw(
        self, logits: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, finite = super().draw(logits, slots, positions)
        return tokens.zero_(), finite


@pytest.fixture(params=[qwen3, gemma3], ids=lambda make: make.__name__)
def loaded(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[TokenStage, Card]]:
    """A stage on our kernels, and the card that it runs on."""
    monkeypatch.setattr(build, "choose_operations", lambda device, dtype: TritonOperations())
    monkeypatch.setattr(build, "prove", lambda *args: None)  # nothing is computed
    monkeypatch.setattr("polymux.core.compute.triton.operations.recognise_gate", lambda act, device: "silu")
    with pretend_card() as card, torch.inference_mode():
        decoder = accelerate(TransformersDecoder(request.param().to(torch.bfloat16)))
        assert isinstance(decoder, FastDecoder)
        settings = SiteSettings(max_rows=ROWS, max_units=UNITS, cache_bytes=1 << 24, superpage=1 << 20)
        stage = TokenStage("decode", decoder, Site(settings=settings, attention_backends=(Anywhere(),)))
        stage._drawer.slots = Blind(ROWS + 1, torch.device("cpu"))
        card.variants.clear()
        yield stage, card


def launch(stage: TokenStage, batch: TokenBatch) -> None:
    logits = stage.model.forward(batch)
    slots = batch.context.batch.slots[batch.finals]
    stage._drawer.slots.draw(logits, anywhere(slots), anywhere(slots))  # type: ignore[union-attr]


def anywhere(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers where a slice of one upload may begin: at an odd place."""
    return torch.cat([numbers[:1], numbers])[1:]


def displace(batch: TokenBatch, length: int) -> TokenBatch:
    """With indices at odd places, and rows that have `length` tokens behind them."""
    rows = batch.context.batch
    batch.context.batch = replace(
        rows,
        lengths=[each + length for each in rows.lengths],
        slots=anywhere(rows.slots),
        row_starts=anywhere(rows.row_starts),
        row_lengths=anywhere(rows.row_lengths),
        token_slots=anywhere(rows.token_slots),
        positions=anywhere(rows.positions),
    )
    return replace(batch, positions=anywhere(batch.positions))


def replay(stage: TokenStage, frames: list[Frame]) -> None:
    for frame in frames:
        stage._mix(frame, torch.from_numpy(frame.fill([], ROWS)))


def every_launch(stage: TokenStage) -> None:
    """Recorded steps of all sizes, together with and without a common prefix; mixed launches of all kinds."""
    for size, sharing in product(size_ladder(ROWS), (False, True)):
        slots = torch.full((size,), ROWS)
        shared = torch.tensor([SHARED_TOKENS]) if sharing else None
        if not sharing or size >= 8:
            stage._step(slots, slots, shared, ())
    few, others = list_frames(UNITS, ROWS)
    replay(stage, [*few, *others])
    draw = Random(0)
    pairs = [[1] * singles + [count] for singles in (0, 1, 2, 5) for count in (1, 2, 3, 4, 31, 65, 130)]
    some = [[draw.choice((1, 1, 1, 9, 70, 300)) for _ in range(draw.randint(1, 9))] for _ in range(12)]
    for counts, length, moved in product([*pairs, *some, [UNITS]], (0, 3000), (False, True)):
        batch = stage._packer.pack_idle(sorted(counts))
        launch(stage, displace(batch, length) if moved else batch)


def test_every_kernel_that_serving_needs_is_compiled_before(loaded: tuple[TokenStage, Card]) -> None:
    stage, card = loaded
    stage.rehearse()
    for size in (1, 16, 64, 256):  # what is recorded first
        stage._step(torch.full((size,), ROWS), torch.full((size,), -1), None, ())
    replay(stage, list_frames(UNITS, ROWS)[0])
    ready = set(card.variants)
    every_launch(stage)
    late = sorted(f"{name}: {variant}" for name, variant in card.variants - ready)
    assert not late, "\n".join(late)
    assert len(ready) < 60


def test_what_is_compiled_ahead_is_all_that_the_rehearsal_launches(loaded: tuple[TokenStage, Card]) -> None:
    stage, card = loaded
    with compiling_ahead(torch.device("cpu")):
        stage.rehearse()
    ahead = set(card.variants)
    stage.rehearse()
    assert card.variants == ahead


@pytest.mark.parametrize("longest", [1, 17, 448, 2048])
def test_no_padding_is_longer_than_a_row_can_be(longest: int) -> None:
    """Whisper decodes 448 tokens and CSM 2048 where launches have 4096: a longer row's blocks would be looked up
    behind its table, and what stands there is no block."""
    launches = list_mixed(4096, longest)
    assert max(map(sum, launches)) == 4096
    for counts in launches:
        assert max(counts) <= longest
        assert counts == sorted(counts)


@pytest.mark.slow
def test_all_of_them_compile_for_a_hopper(loaded: tuple[TokenStage, Card]) -> None:
    """What Triton or the assembler would refuse there, it refuses here."""
    stage, card = loaded
    card.compile = True
    stage.rehearse()
    assert {name for name, _ in card.compiled} >= {"_read", "_join", "_attend", "_rotate", "_read_prefix", "_draw"}
    assert all(kernel.asm["cubin"] for kernel in card.compiled.values())
