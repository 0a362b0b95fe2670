"""`polymux serve` as people run it: a process of its own on a free port, and what it holds."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

PAUSE = 0.2
"""Seconds between two looks at the log."""


class Running:
    """A server that is ready: its address, its log, its processes."""

    def __init__(self, url: str, log: Path, process: psutil.Process) -> None:
        self.url = url
        self.log = log
        self.processes = [process, *process.children(recursive=True)]

    def weigh(self) -> dict[str, int]:
        """What its processes hold together: MiB, threads, descriptors. Raises `RuntimeError` when one died."""
        if not all(process.is_running() for process in self.processes):
            raise RuntimeError(self.log.read_text()[-5000:])
        return {
            "MiB": sum(map(measure_own, self.processes)) >> 20,
            "threads": sum(process.num_threads() for process in self.processes),
            "descriptors": sum(process.num_fds() for process in self.processes),
        }


@contextmanager
def run_server(folder: Path, *arguments: str, environment: Mapping[str, str] | None = None) -> Iterator[Running]:
    """Serve from `folder`, which gets the log, until the block is left. Raises `RuntimeError` with the log when it ends
    before it is ready."""
    log = folder / "server.log"
    command = [sys.executable, "-m", "polymux", "serve", "--port", "0", *arguments]
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=file, stderr=file)
    try:
        while not (ready := re.search(r"ready: (\S+)/v1", log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(log.read_text()[-5000:])
            time.sleep(PAUSE)
        yield Running(ready[1], log, psutil.Process(process.pid))
    finally:
        process.terminate()
        process.wait(60)


def measure_own(process: psutil.Process) -> int:
    """Bytes that the process has written, for itself or for others too, also where they are swapped out. Pages of
    weights' files come and go as the system likes."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * sum(int(size) for _, size in re.findall(r"^(RssAnon|RssShmem|VmSwap):\s+(\d+) kB", status, re.M))
