"""Our Triton kernels for packed rows against the reference; on a card, or in Triton's interpreter.

TRITON_INTERPRET=1 pytest -m gpu tests/core/compute/test_triton.py   (without a card)
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from itertools import accumulate

import pytest
import torch

from polymux.core.batch.tokens import TokenStage
from polymux.core.compute.attention import AttentionOptions, PackedContext, PackedRows
from polymux.core.compute.body import TransformersBody, pack_texts
from polymux.core.compute.decoder import TransformersDecoder
from polymux.core.compute.device import open_device
from polymux.core.compute.fast import accelerate
from polymux.core.compute.fast import build as build_module
from polymux.core.compute.fast import encoder as encoder_module
from polymux.core.compute.fast.operations import Operations, rotate
from polymux.core.compute.load import prepare_body
from polymux.core.compute.sdpa import SdpaAttention
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.generation.program import GenerationProgram
from polymux.core.generation.work import GenerateWork
from polymux.core.tasks import Sampling
from polymux.core.testing.drive import Driver
from polymux.core.testing.tiny import build, tiny_bert, tiny_gemma3, tiny_qwen3
from polymux.core.text.flat import flatten

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

if not INTERPRETED and DEVICE == "cpu":
    pytest.skip("needs a card, or TRITON_INTERPRET=1", allow_module_level=True)

pytest.importorskip("triton")

from polymux.core.compute.triton.attention import TritonAttention  # noqa: E402
from polymux.core.compute.triton.layer_norm import add_layer_norm  # noqa: E402
from polymux.core.compute.triton.operations import TritonOperations  # noqa: E402
from polymux.core.compute.triton.packed import attend_packed  # noqa: E402
from polymux.core.compute.triton.rotary import rotate_heads  # noqa: E402

LENGTHS = (1, 70, 3, 129)
STARTS = [0, *accumulate(LENGTHS)]
DTYPES = {torch.float32: 2e-5, torch.float16 if INTERPRETED else torch.bfloat16: 2e-2}
"""Triton's interpreter does not multiply in bfloat16."""


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


OPTIONS = {
    "causal": AttentionOptions(0.2),
    "both ways": AttentionOptions(0.2, causal=False),
    "window": AttentionOptions(0.2, window=9),
    "window both ways": AttentionOptions(0.2, causal=False, window=9),
    "softcap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=torch.linspace(-1, 2, 4)),
    "everything": AttentionOptions(0.2, window=9, softcap=3.0, sinks=torch.linspace(-1, 2, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 80])
@pytest.mark.parametrize("name", OPTIONS)
def test_packed_attention_equals_the_reference(name: str, dim: int, dtype: torch.dtype) -> None:
    """Grouped heads, read as views of one merged product."""
    options = OPTIONS[name]
    if options.sinks is not None:
        options = AttentionOptions(0.2, True, options.window, options.softcap, options.sinks.to(DEVICE))
    merged = draw(STARTS[-1], 8, dim, dtype=dtype)
    query, key, value = merged.split([4, 2, 2], dim=1)
    rows = PackedRows(STARTS)
    found = attend_packed(query, key, value, rows.edges(merged.device), options)
    exact = SdpaAttention().packed(query.float(), key.float(), value.float(), rows, options)
    torch.testing.assert_close(found.float(), exact, rtol=DTYPES[dtype], atol=DTYPES[dtype])


class Packed(SdpaAttention):
    """Our kernel whatever the dtype."""

    def packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: PackedRows,
        options: AttentionOptions,
    ) -> torch.Tensor:
        return attend_packed(query, key, value, rows.edges(query.device), options)


class Bare:
    """A context of somebody's own: it attends, and is no more than that."""

    def __init__(self, context: PackedContext) -> None:
        self.attend = context.attend


@pytest.mark.parametrize("make", [tiny_bert, tiny_qwen3, tiny_gemma3], ids=lambda make: make.__name__)
def test_bodies_on_fused_kernels_equal_the_reference(
    make: Callable[[], torch.nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (build_module, encoder_module):
        monkeypatch.setattr(module, "choose_operations", lambda device, dtype: TritonOperations())
    model = build(make)
    model = getattr(model, "model", model).to(DEVICE)
    fast = prepare_body(copy.deepcopy(model))
    assert not isinstance(fast, TransformersBody)
    device = open_device(DEVICE)
    lists = [list(range(5, 5 + length % 90)) for length in LENGTHS]
    with torch.inference_mode():
        texts = pack_texts(*flatten(lists), device, Packed())
        found = fast.run(texts.ids, texts.places, None, texts.context)
        bare = fast.run(texts.ids, texts.places, None, Bare(texts.context))  # type: ignore[arg-type]
        alone = [model(input_ids=texts.ids.new_tensor([ids])).last_hidden_state[0] for ids in lists]
    torch.testing.assert_close(found, torch.cat(alone), rtol=1e-4, atol=1e-4)
    assert torch.equal(found, bare)


GREEDY = Sampling(temperature=0.0)


class Anywhere(TritonAttention):
    """Also where the kernels are interpreted."""

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        return None


def test_a_decoder_on_fused_kernels_writes_and_reads_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two prompts, then a few tokens of each: what the reference tier draws."""
    found = {}
    for tier, backends in (("reference", ()), ("fast", (Anywhere(),))):
        operations = TritonOperations() if tier == "fast" else Operations()
        monkeypatch.setattr(build_module, "choose_operations", lambda device, dtype, chosen=operations: chosen)
        site = Site(open_device(DEVICE), SiteSettings(cache_bytes=1 << 18, superpage=1 << 14, block=4), backends)
        decoder = TransformersDecoder(build(tiny_qwen3).to(DEVICE))
        stage = TokenStage("decode", accelerate(decoder) if tier == "fast" else decoder, site)
        driver = Driver(Loop(site, {"m": GenerationProgram(stage, "m")}))
        for name, prompt in (("a", [5, 6, 7, 8, 9]), ("b", [20, 21])):
            driver.submit(
                name, "m", "complete", GenerateWork(prompts=[prompt], max_tokens=[3], seeds=[0], sampling=GREEDY)
            )
        driver.finish()
        found[tier] = [driver.tokens("a"), driver.tokens("b")]
    assert found["fast"] == found["reference"]


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("dim", [16, 24])
def test_heads_are_normed_and_rotated_in_place(dim: int, normed: bool) -> None:
    merged = draw(9, 5 + 2, dim)
    table = draw(2, 40, dim // 2).repeat(1, 1, 2)
    positions = torch.arange(3, 12, device=DEVICE)
    q_weight, k_weight = draw(dim), draw(dim) + 1
    expected = merged[:, :5].clone()
    if normed:
        weights = torch.stack([q_weight] * 3 + [k_weight] * 2)
        expected = torch.nn.functional.rms_norm(expected, (dim,), eps=1e-6) * weights
    expected = rotate(expected, table[0, positions][:, None], table[1, positions][:, None])
    untouched = merged[:, 5:].clone()
    rotate_heads(merged, 3, 2, (table, positions), (q_weight, k_weight, 1e-6) if normed else None)
    torch.testing.assert_close(merged[:, :5], expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(merged[:, 5:], untouched)


@pytest.mark.parametrize("width", [32, 384, 700])
def test_layer_norm_of_a_sum(width: int) -> None:
    x, residual, weight, bias = draw(5, width), draw(5, width) * 3 + 1, draw(width), draw(width) + 2
    expected = torch.nn.functional.layer_norm(x + residual, (width,), weight, bias, 1e-5)
    torch.testing.assert_close(add_layer_norm(x, residual, weight, bias, 1e-5)[0], expected, rtol=1e-5, atol=1e-5)
