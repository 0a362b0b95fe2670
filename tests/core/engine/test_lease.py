"""Leases: bounded, read once, given back, never another array's bytes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from polymux.core.engine.folder import sweep
from polymux.core.engine.lease import LeasePool, borrow, drop
from polymux.core.errors import InternalError, Overloaded


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[LeasePool]:
    pool = LeasePool(budget=1000, root=tmp_path)
    yield pool
    pool.close()
    assert list(tmp_path.iterdir()) == []


def test_a_lease_is_read_once_and_what_was_read_can_be_written(pool: LeasePool, tmp_path: Path) -> None:
    array = np.arange(60, dtype=">i2").reshape(3, 4, 5)
    lease = pool.lend(array[:, ::2])
    assert (pool.outstanding, pool.outstanding_bytes) == (1, 60)
    read = borrow(lease, tmp_path)
    assert read.dtype == array.dtype
    np.testing.assert_array_equal(read, array[:, ::2])
    read += 1
    assert (pool.outstanding, pool.outstanding_bytes) == (0, 0)
    with pytest.raises(InternalError, match="gone"):
        borrow(lease, tmp_path)


def test_a_used_up_budget_is_a_clear_error_until_something_is_read(pool: LeasePool, tmp_path: Path) -> None:
    first = pool.lend(np.zeros(600, np.uint8))
    with pytest.raises(Overloaded, match="1100 bytes wanted, 1000 allowed") as caught:
        pool.lend(np.zeros(500, np.uint8))
    assert caught.value.status == 429
    borrow(first, tmp_path)
    drop(pool.lend(np.zeros(500, np.uint8)), tmp_path)
    assert pool.outstanding == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
def test_a_full_shared_memory_is_the_same_error(pool: LeasePool, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened("/dev/full", os.O_WRONLY))
    with pytest.raises(Overloaded, match="No space left"):
        pool.lend(np.zeros(10))
    monkeypatch.undo()
    assert pool.outstanding_bytes == 0


def test_release_takes_back_what_a_job_never_read(pool: LeasePool, tmp_path: Path) -> None:
    leases = [pool.lend(np.zeros(10), holder="a"), pool.lend(np.zeros(10), holder="a"), pool.lend(np.ones(10))]
    borrow(leases[0], tmp_path)
    assert pool.release("a") == 1
    assert pool.release("a") == 0
    assert pool.outstanding == 1
    assert borrow(leases[2], tmp_path).sum() == 10


@pytest.mark.parametrize(
    "change",
    [
        {"generation": 7},
        {"shape": (99,)},
        {"shape": (-1,)},
        {"offset": 0},
        {"dtype": "O"},
        {"name": "../../etc/passwd"},
        {"name": "polymux-1-x/../../secret"},
    ],
    ids=str,
)
def test_a_wrong_lease_reads_nothing(pool: LeasePool, tmp_path: Path, change: dict) -> None:
    lease = pool.lend(np.zeros(10))
    with pytest.raises(InternalError):
        borrow(msgspec.structs.replace(lease, **change), tmp_path)
    borrow(lease, tmp_path)


def test_elements_that_are_no_numbers_are_refused(pool: LeasePool) -> None:
    with pytest.raises(TypeError, match="object"):
        pool.lend(np.array([object()]))


def test_a_forked_child_does_not_remove_its_parents_leases() -> None:
    script = """
import os, sys
import numpy as np
from polymux.core.engine.lease import borrow, process_pool
lease = process_pool().lend(np.ones(10))
child = os.fork()
if child == 0:
    process_pool()
    sys.exit(0)
os.waitpid(child, 0)
print(borrow(lease).sum())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "10.0"


def test_what_a_killed_owner_lent_is_swept(tmp_path: Path) -> None:
    script = """
import os, signal, sys
from pathlib import Path
import numpy as np
from polymux.core.engine.lease import LeasePool
LeasePool(root=Path(sys.argv[1])).lend(np.zeros(100_000))
os.kill(os.getpid(), signal.SIGKILL)
"""
    died = subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=False)
    assert died.returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 1
    assert len(sweep(tmp_path)) == 1
    assert list(tmp_path.iterdir()) == []
