"""Int8 linear layers: rows are independent of each other, close to float32, and work without a compiler."""

from __future__ import annotations

import logging
import multiprocessing
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from polymux.core.compute import int8_kernel, native
from polymux.core.compute.int8 import Int8Linear, merge_linears, quantize_weight
from polymux.core.compute.int8_kernel import find_limit, load_int8_kernel
from polymux.core.compute.native import KernelUnavailable, load_library
from polymux.core.errors import ConfigError

SHAPES = [(1, 1), (2, 3), (7, 16), (16, 31), (17, 33), (83, 577), (576, 1536), (960, 576)]
WAYS = [True, False]


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty cache, and a process that has not looked for the kernel yet."""
    monkeypatch.setenv("POLYMUX_HOME", str(tmp_path))
    load_int8_kernel.cache_clear()
    yield tmp_path
    load_int8_kernel.cache_clear()


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=WAYS, ids=["kernel", "torch"])
def way(request: pytest.FixtureRequest) -> bool:
    if request.param and load_int8_kernel() is None:
        pytest.skip("the kernel cannot run on this machine")
    return request.param


def relative_error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return float((got - expected).norm() / expected.norm())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_row_is_bitwise_the_same_in_any_company(way: bool, shape: tuple[int, int]) -> None:
    layer = Int8Linear(torch.randn(shape), torch.randn(shape[0]), native=way)
    x = torch.randn(210, shape[1])
    x[7] *= 1e4
    alone = torch.cat([layer(row[None]) for row in x])
    for rows in [*range(1, 41), 95, 96, 97, 210]:
        assert torch.equal(layer(x[:rows]), alone[:rows])
    assert torch.equal(layer(x[33:50]), alone[33:50])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_threads_change_nothing(way: bool, threads: int) -> None:
    layer = Int8Linear(torch.randn(200, 96), native=way)
    x = torch.randn(20, 96)
    expected = layer(x)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(layer(x), expected)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_close_to_float32(way: bool, shape: tuple[int, int], biased: bool) -> None:
    weight = torch.randn(shape)
    bias = torch.randn(shape[0]) if biased else None
    x = torch.randn(40, shape[1])
    assert relative_error(Int8Linear(weight, bias, native=way)(x), linear(x, weight, bias)) < 0.015


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_is_the_product_of_the_rounded_weights(shape: tuple[int, int]) -> None:
    if load_int8_kernel() is None:
        pytest.skip("the kernel cannot run on this machine")
    weight, x = torch.randn(shape), torch.randn(19, shape[1])
    codes, scales = quantize_weight(weight)
    exact = x.double() @ (codes.double() * scales.double()[:, None]).T
    assert relative_error(Int8Linear(weight)(x).double(), exact) < 1e-4


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_ways_agree(shape: tuple[int, int]) -> None:
    weight, bias, x = torch.randn(shape), torch.randn(shape[0]), torch.randn(70, shape[1])
    assert relative_error(Int8Linear(weight, bias, native=False)(x), Int8Linear(weight, bias)(x)) < 0.01


def test_the_largest_sums_do_not_overflow() -> None:
    weight, x = torch.ones(16, 20_000), torch.ones(2, 20_000)
    assert find_limit(quantize_weight(weight)[0]) == (2**31 - 1) // (127 * 20_000)
    assert torch.allclose(Int8Linear(weight)(x), torch.full((2, 16), 20_000.0), rtol=1e-5)
    assert torch.allclose(Int8Linear(-weight)(x), torch.full((2, 16), -20_000.0), rtol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("place", [0, 36])
def test_a_row_that_is_not_finite_harms_only_itself(way: bool, bad: float, place: int) -> None:
    layer = Int8Linear(torch.randn(20, 37), native=way)
    x = torch.randn(9, 37)
    expected = layer(x)
    x[4, place] = bad
    got = layer(x)
    assert not got[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(got[others], expected[others])


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-40])
def test_zeros_and_values_next_to_zero(way: bool, value: float) -> None:
    got = Int8Linear(torch.ones(5, 40), native=way)(torch.full((2, 40), value))
    assert torch.allclose(got, torch.zeros(2, 5))


def test_a_weight_row_of_zeros_gives_zero(way: bool) -> None:
    weight = torch.randn(4, 40)
    weight[2] = 0
    assert torch.equal(Int8Linear(weight, native=way)(torch.randn(3, 40))[:, 2], torch.zeros(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shape_and_dtype_of_the_input_come_back(way: bool, dtype: torch.dtype) -> None:
    layer = Int8Linear(torch.randn(6, 10), native=way)
    assert layer(torch.randn(2, 3, 10, dtype=dtype)).shape == (2, 3, 6)
    assert layer(torch.randn(10, dtype=dtype)).dtype == dtype
    assert layer(torch.randn(0, 10, dtype=dtype)).shape == (0, 6)


def test_an_input_with_gaps_in_memory(way: bool) -> None:
    layer = Int8Linear(torch.randn(6, 10), native=way)
    x = torch.randn(10, 8).T
    assert torch.equal(layer(x), layer(x.contiguous()))


def test_merged_layers_give_the_parts_side_by_side(way: bool) -> None:
    parts = [nn.Linear(24, 9), nn.Linear(24, 17, bias=False), nn.Linear(24, 3)]
    x = torch.randn(5, 24)
    expected = torch.cat([Int8Linear(part.weight, part.bias, native=way)(x) for part in parts], dim=1)
    assert torch.equal(merge_linears(parts, native=way)(x), expected)


def test_merging_layers_of_different_inputs_is_refused() -> None:
    with pytest.raises(ConfigError, match="same input"):
        merge_linears([nn.Linear(3, 4), nn.Linear(5, 4)])


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (torch.ones(2, 3, dtype=torch.int8), None, "floating"),
        (torch.ones(2), None, "floating"),
        (torch.ones(0, 3), None, "empty"),
        (torch.full((2, 3), float("nan")), None, "NaN"),
        (torch.ones(2, 3), torch.ones(3), "bias"),
        (torch.ones(2, 3, device="meta"), None, "CPU"),
    ],
)
def test_weights_that_cannot_work_are_refused(weight: torch.Tensor, bias: torch.Tensor | None, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Int8Linear(weight, bias)


def test_an_input_of_the_wrong_width_is_refused(way: bool) -> None:
    with pytest.raises(ValueError, match="this layer reads 10"):
        Int8Linear(torch.randn(6, 10), native=way)(torch.randn(5, 12))


@pytest.mark.parametrize("compiler", ["/bin/false", "no-such-compiler"])
def test_without_a_working_compiler_torch_does_the_work(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, compiler: str
) -> None:
    monkeypatch.setenv("CXX", compiler)
    monkeypatch.setattr(native, "COMPILERS", ())
    weight, x = torch.randn(8, 64), torch.randn(3, 64)
    with caplog.at_level(logging.WARNING, "polymux.compute"):
        layers = [Int8Linear(weight) for _ in range(3)]
    assert [layer.native for layer in layers] == [False] * 3
    assert len(caplog.records) == 1
    assert relative_error(layers[0](x), linear(x, weight)) < 0.015


def test_without_avx2_torch_does_the_work(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    assert not Int8Linear(torch.randn(8, 64)).native


def test_a_source_that_does_not_compile_says_why(cache: Path, tmp_path: Path) -> None:
    source = tmp_path / "broken.cpp"
    source.write_text("int main( {")
    with pytest.raises(KernelUnavailable, match=r"broken\.cpp|no C\+\+ compiler"):
        load_library(source, ())
    assert [path.name for path in (cache / "kernels").iterdir() if path.suffix != ".lock"] == []


def test_a_library_that_does_not_load_is_not_fatal(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_compile", lambda _, __, folder: (folder / "kernel.so").write_bytes(b"no library"))
    with pytest.raises(KernelUnavailable, match="cannot be used"):
        load_library(Path(int8_kernel.__file__).with_name("int8_kernel.cpp"), ())


def _build_in_child(home: str) -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("POLYMUX_HOME", home)
        return int8_kernel.load_int8_kernel() is not None


@pytest.mark.slow
def test_two_processes_build_one_library(cache: Path) -> None:
    if load_int8_kernel() is None:
        pytest.skip("the kernel cannot run on this machine")
    home = str(cache / "shared")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        assert pool.map(_build_in_child, [home, home]) == [True, True]
    assert len(list(Path(home).glob("kernels/*/kernel.so"))) == 1
