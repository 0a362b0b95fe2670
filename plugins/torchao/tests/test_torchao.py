"""Four bits: close to the layer they stand for, in any shape and dtype, each row its own; a model served with them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from polymux.core.compute.quantization import find_quantization, quantize_model
from polymux.core.errors import ConfigError
from polymux.core.plugins import load_plugins
from polymux.core.testing.conformance import run_checks
from polymux.core.testing.tiny import build, tiny_bert

PROJECT = Path(__file__).parent.parent
sys.path.append(str(PROJECT))
pytest.importorskip("torchao", reason="it is tested apart: make apart")
from polymux_torchao.int4 import Int4, Int4Linear  # noqa: E402


@pytest.mark.parametrize("shape", [(96, 64), (100, 64), (64, 48), (1, 1), (17, 33), (256, 1024)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_any_shape_and_dtype(shape: tuple[int, int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    layer = nn.Linear(shape[1], shape[0]).to(dtype)
    made = Int4Linear(layer.weight, layer.bias)
    rows = torch.randn(2, 5, shape[1], dtype=dtype)
    with torch.no_grad():
        exact, found = layer(rows).float(), made(rows)
        assert found.dtype == dtype and found.shape == exact.shape
        assert (found.float() - exact).norm() < 0.15 * exact.norm() + 1e-3
        assert torch.equal(made(rows[:1, :1]), found[:1, :1]), "a row depends on no other"


def test_four_bits_are_kept() -> None:
    packed = Int4Linear(torch.randn(64, 128), None).weight
    assert packed.qdata.numel() * packed.qdata.element_size() == 64 * 128 // 2


@pytest.mark.parametrize(
    ("weight", "says"),
    [(torch.full((16, 32), float("inf")), "infinite"), (torch.ones(16), "floating"), (torch.ones(0, 4), "floating")],
)
def test_what_cannot_be_held_is_refused(weight: torch.Tensor, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Int4Linear(weight, None)


def test_it_is_found_by_its_name_and_serves_a_model() -> None:
    plugins = load_plugins([PROJECT])
    make = find_quantization("int4", torch.device("cpu"), plugins.quantizers())
    assert make is not None and plugins.find("torchao").status == "enabled"
    model = build(tiny_bert)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        exact = model(input_ids=ids).last_hidden_state
        quantize_model(model, "int4", torch.device("cpu"), plugins.quantizers())
        found = model(input_ids=ids).last_hidden_state
    assert any(isinstance(layer, Int4Linear) for layer in model.modules())
    assert torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.95


def test_other_devices_are_refused() -> None:
    assert "CPU only" in str(Int4().refuses(torch.device("cuda")))


@pytest.mark.slow
def test_it_passes_the_check() -> None:
    assert run_checks(PROJECT) == 0
