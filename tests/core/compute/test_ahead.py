"""Kernels are compiled side by side, without being launched, before they are launched one after the other."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("interpreted kernels are not compiled", allow_module_level=True)

import triton.language as tl
from triton.runtime.jit import JITFunction

from polymux.core.compute.ahead import compile_ahead
from polymux.core.compute.triton import ahead
from polymux.core.compute.triton.ahead import compiling_ahead
from polymux.core.compute.triton.jit import kernel
from polymux.core.testing.card import pretend_card

CPU = torch.device("cpu")


@kernel()
def _scale(x, y, count, FACTOR: tl.constexpr):  # type: ignore[no-untyped-def]
    places = tl.arange(0, 64)
    tl.store(y + places, tl.load(x + places, places < count) * FACTOR, places < count)


def test_inside_nothing_is_launched(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    monkeypatch.setattr(JITFunction, "run", lambda kernel, *args, grid, warmup, **options: seen.append(warmup))
    x = torch.zeros(64)
    with compiling_ahead(CPU):
        _scale[(1,)](x, x, 64, FACTOR=2)
    _scale[(1,)](x, x, 64, FACTOR=2)
    with pytest.raises(ZeroDivisionError), compiling_ahead(CPU):
        _ = 1 / 0
    _scale[(1,)](x, x, 64, FACTOR=2)
    assert seen == [True, False, False]


def test_what_no_kernel_has_written_is_a_valid_index() -> None:
    x = torch.ones(4)
    with torch.inference_mode(), compiling_ahead(CPU):
        made = [
            torch.empty(500, dtype=torch.int64),
            torch.empty_like(x),
            x.new_empty(7),
            torch.empty_strided((5,), (2,)),
        ]
    assert not any(bool(each.any()) for each in made)
    assert bool(x.all())


def test_without_a_card_nothing_is_run() -> None:
    compile_ahead(lambda: pytest.fail("it was run"), CPU)


@pytest.mark.slow
def test_kernels_are_compiled_by_threads_and_one_that_cannot_be_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    def make(compile: Any) -> Any:
        made.append(compile())
        return made[-1]

    monkeypatch.setattr(ahead, "_make", make)  # there is no card that a launcher could bring it to
    x = torch.zeros(64)
    with pretend_card() as card:
        card.compile = True
        with compiling_ahead(CPU):
            for factor in (2, 3, "no number", 2):
                _scale[(1,)](x, x, 64, FACTOR=factor)
    assert len(made) == 2
    assert all(each.asm["cubin"] for each in made)
