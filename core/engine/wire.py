"""What crosses a process boundary: msgpack of Structs, arrays included; nothing is ever unpickled.

An array of up to 64 KiB travels inside the message, a larger one as a shared-memory lease (`core.engine.lease`).
Either way a Struct's field of type `np.ndarray` arrives as a writable array, wherever it stands in the Struct.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from polymux.core.engine.lease import Lease, LeasePool, borrow, drop, process_pool
from polymux.core.vocabulary import Command, Report, Reports

INLINE_BYTES = 64 << 10

_INLINE = 1
_LEASED = 2
_KINDS = "biufc"

T = TypeVar("T", bound=msgspec.Struct)


class _Inline(msgspec.Struct, array_like=True):
    dtype: str
    shape: tuple[int, ...]
    data: memoryview


def pack(body: msgspec.Struct, *, holder: str | None = None, pool: LeasePool | None = None) -> msgspec.Raw:
    """A pipeline's Struct as the body of a `Submit`, `Post` or `Output`.

    `holder` is for the side that asks: the job whose end takes back what the engine never read of it. An engine
    names none, for its outputs may be read after the job has ended. Raises `Overloaded` when shared memory is used
    up (nothing stays lent then), `TypeError` for an array whose elements are not numbers.
    """
    lent: list[Lease] = []

    def encode(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise TypeError(f"a value of type {type(value).__name__} cannot cross a process boundary")
        if value.nbytes < INLINE_BYTES:
            return _inline(value)
        lent.append((pool or process_pool()).lend(value, holder))
        return msgspec.msgpack.Ext(_LEASED, _encoder.encode(lent[-1]))

    try:
        return msgspec.Raw(msgspec.msgpack.encode(body, enc_hook=encode))
    except BaseException:
        for lease in lent:
            drop(lease)
        raise


def unpack(raw: msgspec.Raw, kind: type[T]) -> T:
    """The Struct behind a body, with its leases read (and so ended).

    Raises `msgspec.ValidationError` when the body is no `kind`, `InternalError` when a lease is gone.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = msgspec.msgpack.Decoder(kind, dec_hook=_accept, ext_hook=_decode)
        _decoders[kind] = decoder
    body: T = decoder.decode(raw)
    return body


def discard(raw: msgspec.Raw) -> None:
    """End the leases of a body that nobody will unpack. A body without any costs next to nothing."""
    if b"polymux-" in bytes(raw):
        _discarder.decode(raw)


def encode_command(command: Command) -> bytes:
    return _encoder.encode(command)


def decode_command(message: bytes) -> Command:
    return _commands.decode(message)


def encode_reports(reports: Sequence[Report]) -> bytes:
    return _encoder.encode(Reports(reports))


def decode_reports(message: bytes) -> Sequence[Report]:
    return _reports.decode(message).reports


def _inline(array: np.ndarray) -> msgspec.msgpack.Ext:
    if array.dtype.kind not in _KINDS:
        raise TypeError(f"an array of dtype {array.dtype} cannot cross a process boundary")
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    return msgspec.msgpack.Ext(_INLINE, _encoder.encode(_Inline(array.dtype.str, array.shape, data)))


def _decode(code: int, data: memoryview) -> np.ndarray:
    if code == _LEASED:
        return borrow(_leases.decode(data))
    if code != _INLINE:
        raise msgspec.ValidationError(f"extension {code} is unknown")
    inline = _inlines.decode(data)
    try:
        dtype = np.dtype(inline.dtype)
        if dtype.kind not in _KINDS:
            raise ValueError(f"elements of type {inline.dtype} are no numbers")
        return np.frombuffer(inline.data, dtype).reshape(inline.shape).copy()
    except (TypeError, ValueError) as error:
        raise msgspec.ValidationError(f"a malformed array: {error}") from error


def _accept(kind: type, value: Any) -> Any:
    if isinstance(value, kind):
        return value
    raise msgspec.ValidationError(f"expected {kind.__name__}, got {type(value).__name__}")


def _forget(code: int, data: memoryview) -> None:
    if code == _LEASED:
        drop(_leases.decode(data))


_encoder = msgspec.msgpack.Encoder()
_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Reports)
_leases = msgspec.msgpack.Decoder(Lease)
_inlines = msgspec.msgpack.Decoder(_Inline)
_discarder = msgspec.msgpack.Decoder(ext_hook=_forget)
_decoders: dict[type, msgspec.msgpack.Decoder[Any]] = {}
