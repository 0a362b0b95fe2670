"""Where polymux keeps what it fetched or converted, and how two processes build there without meeting."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from polymux.core.errors import ModelError


def find_home() -> Path:
    """`POLYMUX_HOME`, else `~/.cache/polymux`."""
    return Path(os.environ.get("POLYMUX_HOME") or "~/.cache/polymux").expanduser()


def find_entry(kind: str, identity: str) -> Path:
    """The folder for `identity` under the cache's `kind` ("wheels", "models"); readable and free of collisions."""
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", identity).strip("-.")[:60].strip("-.")
    digest = hashlib.sha256(identity.encode()).hexdigest()[:16]
    return find_home() / kind / f"{readable}-{digest}"


def build_once(entry: Path, build: Callable[[Path], None]) -> Path:
    """`entry`, filled by `build(folder)` if it is not there yet.

    `build` works in a folder beside it that is renamed when complete, so `entry` is whole or absent; a lock lets one
    process build while others wait. Raises `ModelError` when the cache cannot be written.
    """
    from filelock import FileLock

    if entry.exists():
        return entry
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{entry}.lock"):
            if not entry.exists():
                folder = Path(tempfile.mkdtemp(dir=entry.parent, prefix=".building-"))
                try:
                    build(folder)
                    folder.chmod(0o755)
                    folder.rename(entry)
                finally:
                    shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ModelError(f"cannot write the cache at {entry.parent}: {error}. Set POLYMUX_HOME elsewhere") from error
    return entry


def hash_file(path: Path) -> str:
    """The sha256 of a file, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
