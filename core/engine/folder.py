"""A private folder that outlives no process: what a process shares by name dies with it.

Leases and sockets have names in a file system. A process that is killed cannot remove them, so each process keeps
them in one folder of its own, holds a lock on it for as long as it lives, and removes the folders whose lock is
free. A lock tells the dead from the living where a process id cannot: ids are reused, and they mean nothing
between containers that share /dev/shm.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "polymux-"
_LOCK = "lock"
_UNFINISHED = ".new-"


def shared_memory() -> Path:
    """Where shared memory has names: /dev/shm, or the folder for temporary files where there is none."""
    memory = Path("/dev/shm")
    return memory if os.access(memory, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


class PrivateFolder:
    """A folder that only this user can enter (0700), named after its owner and removed with it."""

    def __init__(self, root: Path | None = None) -> None:
        root = root or shared_memory()
        # The lock is taken before the folder has the name that `sweep` looks for: nobody sees it unlocked.
        unfinished = Path(tempfile.mkdtemp(prefix=f"{_UNFINISHED}{PREFIX}{os.getpid()}-", dir=root))
        self._lock = os.open(unfinished / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = unfinished.rename(root / unfinished.name.removeprefix(_UNFINISHED))

    def close(self) -> None:
        if self._lock < 0:
            return
        shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)
        self._lock = -1


def sweep(root: Path | None = None) -> list[str]:
    """Remove this user's folders whose owners are dead; returns their names."""
    root = root or shared_memory()
    swept = []
    for folder in root.glob(f"{PREFIX}*"):
        try:
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another sweep was faster
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            continue
        else:
            shutil.rmtree(folder, ignore_errors=True)
            swept.append(folder.name)
        finally:
            os.close(lock)
    return swept
