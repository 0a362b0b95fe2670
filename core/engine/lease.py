"""Shared-memory leases: how a large array crosses from one process to another without being sent.

The owner writes the array into a file in shared memory and sends its name; the reader maps it and removes the name
(a lease is read once). A lease that will not be read is dropped by whoever knows that: the reader with `drop`, the
owner with `release`. What a dead owner leaves is swept (`core.engine.folder`).

Plain files rather than `multiprocessing.shared_memory`: its resource tracker unlinks segments that another process
still needs and needs a process of its own, and writing to a file reports a full /dev/shm as an error, where a
store into a mapping is killed by SIGBUS.
"""

from __future__ import annotations

import atexit
import math
import mmap
import os
import re
import struct
import threading
from pathlib import Path

import msgspec
import numpy as np

from polymux.core.engine.folder import PREFIX, PrivateFolder, shared_memory, sweep
from polymux.core.errors import InternalError, Overloaded

HEADER = struct.Struct("<8sQQ40x")
"""Magic, generation, bytes; 64 long, so that the array behind it is aligned."""
MAGIC = b"pmxlease"
DEFAULT_BUDGET = 1 << 30

_NAME = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]+/[0-9]+")
_KINDS = "biufc"


class Lease(msgspec.Struct, array_like=True, frozen=True):
    """An array in shared memory: `shape` elements of `dtype` (numpy's own spelling) from byte `offset` of `name`.

    `generation` is written in the memory too, so that a stale lease can never read another array's bytes.
    """

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    generation: int


class LeasePool:
    """The leases one process has given and nobody has read yet, bounded in bytes. Safe to use from any thread."""

    def __init__(self, budget: int | None = None, root: Path | None = None) -> None:
        sweep(root)
        self.folder = PrivateFolder(root)
        if budget is None:
            disk = os.statvfs(self.folder.path)
            budget = min(DEFAULT_BUDGET, disk.f_blocks * disk.f_frsize // 2)
        self.budget = budget
        self._lock = threading.Lock()
        self._next = 0
        self._bytes = 0
        self._given: dict[str, int] = {}
        self._held: dict[str, list[str]] = {}

    def lend(self, array: np.ndarray, holder: str | None = None) -> Lease:
        """Copy `array` into shared memory. `holder` (a job) names what `release` gives back together.

        Raises `Overloaded` when the budget or the shared memory itself is used up.
        """
        dtype = array.dtype
        if dtype.kind not in _KINDS:
            raise TypeError(f"an array of dtype {dtype} cannot cross a process boundary")
        size = array.nbytes
        with self._lock:
            if self._bytes + size > self.budget:
                self._reclaim()
            if self._bytes + size > self.budget:
                raise Overloaded(
                    f"shared memory for large inputs is used up: {self._bytes + size} bytes wanted, "
                    f"{self.budget} allowed; retry when running requests have finished"
                )
            self._next += 1
            generation = self._next
            name = f"{self.folder.path.name}/{generation}"
            self._given[name] = size
            self._bytes += size
            if holder is not None:
                self._held.setdefault(holder, []).append(name)
        try:
            _write(self.folder.path / str(generation), array, generation)
        except OSError as error:
            self._return(name)
            raise Overloaded(f"shared memory for large inputs is full ({error.strerror})") from error
        return Lease(name, HEADER.size, array.shape, dtype.str, generation)

    def release(self, holder: str) -> int:
        """Take back every unread lease of `holder`; returns how many there were."""
        with self._lock:
            names = self._held.pop(holder, ())
        return sum(self._return(name) for name in names)

    def unread(self, holder: str) -> int:
        """Bytes lent for `holder` that nobody has read or dropped yet."""
        with self._lock:
            self._reclaim()
            return sum(self._given.get(name, 0) for name in self._held.get(holder, ()))

    @property
    def outstanding(self) -> int:
        """Leases that nobody has read or dropped yet."""
        with self._lock:
            self._reclaim()
            return len(self._given)

    @property
    def outstanding_bytes(self) -> int:
        with self._lock:
            self._reclaim()
            return self._bytes

    def close(self) -> None:
        self.folder.close()
        with self._lock:
            self._given.clear()
            self._held.clear()
            self._bytes = 0

    def _return(self, name: str) -> bool:
        unread = _unlink(self.folder.path.parent / name)
        with self._lock:
            self._bytes -= self._given.pop(name, 0)
        return unread

    def _reclaim(self) -> None:
        # The reader removes the name: one look at the folder tells which leases are still out.
        here = set(os.listdir(self.folder.path)) if self._given else set()
        for name in [name for name in self._given if name.rpartition("/")[2] not in here]:
            self._bytes -= self._given.pop(name)


def borrow(lease: Lease, root: Path | None = None) -> np.ndarray:
    """The array of a lease, mapped (not copied) and writable; writes stay private. Ends the lease.

    The memory goes back when the last view of the array does. Raises `InternalError` when the lease was read
    before, taken back, or died with its owner.
    """
    dtype, path = _check(lease), _locate(lease, root)
    count = math.prod(lease.shape)
    try:
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise InternalError(
            f"shared memory {lease.name} is gone: read before, taken back, or its owner died"
        ) from error
    try:
        magic, generation, size = HEADER.unpack(os.pread(handle, HEADER.size, 0))
        fits = lease.offset >= HEADER.size and lease.offset + count * dtype.itemsize <= HEADER.size + size
        if magic != MAGIC or generation != lease.generation or not fits:
            raise InternalError(f"shared memory {lease.name} does not hold what its lease says")
        memory = mmap.mmap(handle, HEADER.size + size, access=mmap.ACCESS_COPY)
    finally:
        os.close(handle)
    _unlink(path)
    return np.frombuffer(memory, dtype, count, lease.offset).reshape(lease.shape)


def drop(lease: Lease, root: Path | None = None) -> None:
    """End a lease without reading it. Dropping one that has ended is no error."""
    _unlink(_locate(lease, root))


_pool: LeasePool | None = None
_pool_lock = threading.Lock()


def process_pool() -> LeasePool:
    """The pool of this process, made at first use and closed at exit; a forked child makes its own."""
    global _pool
    with _pool_lock:
        if _pool is None:
            _pool = LeasePool()
        return _pool


def close_process_pool() -> None:
    """Take back everything this process has lent, and its folder."""
    if _pool is not None:
        _pool.close()


def _forget_after_fork() -> None:
    # The folder is the parent's: the child must neither write into it nor remove it at exit.
    global _pool, _pool_lock
    _pool, _pool_lock = None, threading.Lock()


atexit.register(close_process_pool)
os.register_at_fork(after_in_child=_forget_after_fork)


def _write(path: Path, array: np.ndarray, generation: int) -> None:
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
    handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(handle, HEADER.pack(MAGIC, generation, len(data)))
        while data:
            data = data[os.write(handle, data) :]
    except OSError:
        _unlink(path)
        raise
    finally:
        os.close(handle)


def _check(lease: Lease) -> np.dtype:
    dtype = np.dtype(lease.dtype)
    if dtype.kind not in _KINDS or any(size < 0 for size in lease.shape):
        raise InternalError(f"a lease of dtype {lease.dtype} and shape {lease.shape} is malformed")
    return dtype


def _locate(lease: Lease, root: Path | None) -> Path:
    if not _NAME.fullmatch(lease.name):
        raise InternalError(f"{lease.name!r} is no name of shared memory")
    return (root or shared_memory()) / lease.name


def _unlink(path: Path) -> bool:
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    return True
