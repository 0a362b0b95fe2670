"""Attention inside packed rows: every backend against the reference, and the choice of the fastest by measuring."""

from __future__ import annotations

import time
from itertools import accumulate

import pytest
import torch
from torch.nn.attention import SDPBackend

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows
from polymux.core.compute.cpu.attention import NativeAttention
from polymux.core.compute.packed import PACKED_BACKENDS, choose_packed
from polymux.core.compute.packed.backends import CudnnAttention, PackedBackend, bucket
from polymux.core.compute.packed.choice import MeasuredAttention
from polymux.core.compute.packed.probe import try_packed
from polymux.core.compute.packed.report import report_attention
from polymux.core.compute.packed.table import Table, round_length
from polymux.core.compute.sdpa import SdpaAttention

CPU = torch.device("cpu")
CARD = torch.device("cuda:0")
LENGTHS = (1, 70, 129, 3)
STARTS = [0, *accumulate(LENGTHS)]

KINDS = {
    "causal": AttentionOptions(0.2),
    "both ways": AttentionOptions(0.2, causal=False),
    "window": AttentionOptions(0.2, window=9),
    "window both ways": AttentionOptions(0.2, causal=False, window=9),
    "soft cap": AttentionOptions(0.2, softcap=3.0),
    "sinks": AttentionOptions(0.2, sinks=torch.linspace(-1, 2, 4)),
}


def draw(device: torch.device, dtype: torch.dtype, dim: int, starts: list[int] = STARTS) -> tuple[torch.Tensor, ...]:
    """Queries of four heads, keys and values of two, as views of one tensor."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(starts[-1], 8, dim, generator=generator).to(device, dtype).split([4, 2, 2], dim=1)


def attend_exactly(tensors: tuple[torch.Tensor, ...], rows: PackedRows, options: AttentionOptions) -> torch.Tensor:
    query, key, value = (tensor.float() for tensor in tensors)
    return SdpaAttention().packed(query, key, value, rows, options)


class Dense(CudnnAttention):
    """The same dense batches without cuDNN."""

    name = "dense"
    kernels = (SDPBackend.MATH,)

    def refuses(self, device: torch.device, dtype: torch.dtype, dim: int) -> str | None:
        return None


class Slow(Dense):
    name = "slow"

    def packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows, options: AttentionOptions
    ) -> torch.Tensor:
        time.sleep(0.2)
        return super().packed(query, key, value, rows, options)


class Wrong(Dense):
    name = "wrong"

    def packed(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rows: PackedRows, options: AttentionOptions
    ) -> torch.Tensor:
        return torch.zeros_like(query)


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("kind", ["causal", "both ways"])
@pytest.mark.parametrize("starts", [STARTS, [0, 64, 128], [0, 5]], ids=["ragged", "even", "one"])
def test_dense_batches_equal_the_reference(kind: str, starts: list[int]) -> None:
    """Rows are padded to a rounded length; the padding reaches nobody."""
    tensors, rows = draw(CPU, torch.float32, 16, starts), PackedRows(starts)
    found = Dense().packed(*tensors, rows, KINDS[kind])
    torch.testing.assert_close(found, attend_exactly(tensors, rows, KINDS[kind]), rtol=1e-5, atol=1e-5)


def test_dense_lengths_are_few() -> None:
    assert bucket(4608) == 4608 and bucket(1) == 64
    assert len({bucket(length) for length in range(1, 4097)}) < 40
    assert all(length <= bucket(length) < length * 1.125 + 64 for length in range(1, 5000))


def test_a_backend_that_is_wrong_or_cannot_says_why() -> None:
    assert try_packed(Dense(), CPU, torch.float32, 16, KINDS["causal"]) is None
    assert "its results are off by" in str(try_packed(Wrong(), CPU, torch.float32, 16, KINDS["causal"]))
    refused = report_attention([NativeAttention(), *PACKED_BACKENDS], measure=False)["refused"]
    if not torch.cuda.is_available():
        assert [line for line in refused if not line.startswith("not native")] == [
            f"not {backend.name}: it needs a CUDA device" for backend in PACKED_BACKENDS
        ]


def test_the_fastest_is_measured_once_and_remembered(home, monkeypatch) -> None:
    chosen = choose_packed([Slow(), Dense()], CPU, torch.float32, 16)
    assert isinstance(chosen, MeasuredAttention)
    tensors, rows = draw(CPU, torch.float32, 16), PackedRows(STARTS)
    found = chosen.packed(*tensors, rows, KINDS["causal"])
    torch.testing.assert_close(found, attend_exactly(tensors, rows, KINDS["causal"]), rtol=1e-5, atol=1e-5)
    (line,) = Table(CPU).lines()
    assert line.startswith("float32, 4/2x16, causal, 256 tokens: ") and line.index("dense") < line.index("slow")
    monkeypatch.setattr("polymux.core.compute.packed.table.measure", None)  # the file knows: nothing is measured
    again = choose_packed([Slow(), Dense()], CPU, torch.float32, 16)
    again.packed(*tensors, rows, KINDS["causal"])


def test_options_that_only_one_claims_go_to_it_unmeasured() -> None:
    chosen = choose_packed([Slow(), Dense()], CPU, torch.float32, 16)
    tensors, rows = draw(CPU, torch.float32, 16), PackedRows(STARTS)
    for kind in ("window", "window both ways", "soft cap", "sinks"):
        found = chosen.packed(*tensors, rows, KINDS[kind])
        assert torch.equal(found, SdpaAttention().packed(*tensors, rows, KINDS[kind]))
    assert Table(CPU).lines() == []


def test_one_backend_alone_is_taken_as_it_is() -> None:
    native = NativeAttention()
    expected = native if native.refuses(CPU, torch.float32, 16) is None else SdpaAttention
    chosen = choose_packed([native, *PACKED_BACKENDS], CPU, torch.float32, 16)
    assert chosen is expected or type(chosen) is expected


def test_a_table_that_cannot_be_read_or_kept_is_no_error(home) -> None:
    Table(CPU).path.parent.mkdir(parents=True)
    Table(CPU).path.write_text("{")
    assert Table(CPU).lines() == []
    assert round_length(1) == 64 and round_length(129) == 256


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a card")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_backend_that_serves_the_card_equals_the_reference(kind: str, dim: int, dtype: torch.dtype) -> None:
    from polymux.core.plugin import attention_backends

    options = KINDS[kind]
    if options.sinks is not None:
        options = AttentionOptions(0.2, sinks=options.sinks.to(CARD))
    tensors, rows = draw(CARD, dtype, dim), PackedRows(STARTS)
    exact = attend_exactly(tensors, rows, options)
    tried: list[AttentionBackend] = []
    for backend in [*attention_backends(), SdpaAttention()]:
        claims = backend.refuses(CARD, dtype, dim) is None and backend.claims(options)
        if claims and (not isinstance(backend, PackedBackend) or not try_packed(backend, CARD, dtype, dim, options)):
            tried.append(backend)
            found = backend.packed(*tensors, rows, options).float()
            torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2, msg=backend.name)
    assert "triton" in [backend.name for backend in tried]
    found = choose_packed(attention_backends(), CARD, dtype, dim).packed(*tensors, rows, options).float()
    torch.testing.assert_close(found, exact, rtol=2e-2, atol=2e-2)
