"""What goes in comes out, arrays included, and nothing that is not plain data crosses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from polymux.core import vocabulary
from polymux.core.engine import lease, wire
from polymux.core.engine.lease import LeasePool, process_pool
from polymux.core.engine.wire import INLINE_BYTES, discard, pack, unpack
from polymux.core.errors import Overloaded


class Picture(msgspec.Struct):
    pixels: np.ndarray
    mask: np.ndarray | None = None
    frames: list[np.ndarray] = []
    named: dict[str, np.ndarray] = {}


class Words(msgspec.Struct):
    words: list[str]


@pytest.fixture
def pool() -> Iterator[LeasePool]:
    pool = LeasePool(budget=3 * INLINE_BYTES)
    yield pool
    pool.close()


LARGE = np.arange(INLINE_BYTES, dtype=np.uint8)
DTYPES = arrays.boolean_dtypes() | arrays.integer_dtypes() | arrays.floating_dtypes() | arrays.complex_number_dtypes()


@settings(max_examples=50, deadline=None)
@given(arrays.arrays(DTYPES, arrays.array_shapes(min_dims=0, min_side=0)), st.booleans())
def test_any_numeric_array_comes_back_equal_and_writable(array: np.ndarray, leased: bool) -> None:
    original, wire.INLINE_BYTES = wire.INLINE_BYTES, 1 if leased else INLINE_BYTES
    try:
        body = pack(Picture(array))
    finally:
        wire.INLINE_BYTES = original
    back = unpack(body, Picture).pixels
    assert (back.dtype, back.shape) == (array.dtype, array.shape)
    assert back.tobytes() == array.tobytes()
    assert back.flags.writeable


def test_small_arrays_travel_inline_and_large_ones_as_leases(pool: LeasePool) -> None:
    picture = Picture(LARGE.reshape(256, -1), mask=LARGE[:-1], frames=[LARGE], named={"scalar": np.array(2.5)})
    body = pack(picture, pool=pool)
    assert pool.outstanding == 2
    assert len(bytes(body)) < INLINE_BYTES + 1000
    back = unpack(body, Picture)
    assert pool.outstanding == 0
    np.testing.assert_array_equal(back.pixels, picture.pixels)
    np.testing.assert_array_equal(back.frames[0], LARGE)
    assert back.named["scalar"] == 2.5


def test_discard_ends_the_leases_of_an_unread_body(pool: LeasePool) -> None:
    body = pack(Picture(LARGE), pool=pool)
    discard(body)
    discard(body)
    discard(pack(Words(["polymux-1-x/1"])))
    assert pool.outstanding == 0


def test_a_body_that_does_not_fit_leaves_nothing_lent(pool: LeasePool) -> None:
    with pytest.raises(Overloaded):
        pack(Picture(LARGE, frames=[LARGE] * 4), pool=pool)
    assert (pool.outstanding, pool.outstanding_bytes) == (0, 0)


@pytest.mark.parametrize("value", [np.array([object()]), np.array(["text"]), {1, 2}.__iter__(), open], ids=repr)
def test_nothing_but_plain_data_crosses(value: Any) -> None:
    class Anything(msgspec.Struct):
        value: Any

    with pytest.raises(TypeError, match="cannot cross a process boundary"):
        pack(Anything(value))


@pytest.mark.parametrize(
    "extension",
    [
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["|O", [1], b"12345678"])),
        msgspec.msgpack.Ext(1, msgspec.msgpack.encode(["<f4", [3], b"1234"])),
        msgspec.msgpack.Ext(9, b""),
        [1, 2],
    ],
)
def test_a_malformed_array_is_a_validation_error(extension: Any) -> None:
    with pytest.raises(msgspec.ValidationError):
        unpack(msgspec.Raw(msgspec.msgpack.encode({"pixels": extension})), Picture)


def test_commands_and_reports_come_back_equal() -> None:
    body = pack(Words(["a"]))
    commands = [
        vocabulary.Submit("j", "m", "chat", body, priority=2, deadline=1.5),
        vocabulary.Cancel("j"),
        vocabulary.Post("j", body),
        vocabulary.Stop(),
    ]
    for command in commands:
        assert wire.decode_command(wire.encode_command(command)) == command
    reports = [
        vocabulary.Ready({"m": {"dtype": "float32", "bytes": 12}}),
        vocabulary.LoadFailed({"message": "no"}),
        vocabulary.Stats({"running": 1.0}),
        vocabulary.Tokens("j", 1, [5, 6], [-0.5, -1.0], [[(5, -0.5)], [(6, -1.0)]]),
        vocabulary.Output("j", "vector", body),
        vocabulary.BranchEnded("j", 1, "stop"),
        vocabulary.Ended("j", vocabulary.Receipt(total_ms=2.5)),
        vocabulary.Failed("j", {"status": 400}),
    ]
    assert wire.decode_reports(wire.encode_reports(reports)) == reports


def test_the_pool_of_a_process_lives_in_shared_memory() -> None:
    assert process_pool() is process_pool()
    assert process_pool().folder.path.parent == lease.shared_memory()
    assert isinstance(process_pool().folder.path, Path)
