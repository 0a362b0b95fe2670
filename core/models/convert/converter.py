"""What a foreign format needs to become readable, and how to run the heavy part without importing torch here."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import ABC, abstractmethod
from pathlib import Path

from polymux.core.errors import ModelError
from polymux.core.models.source import Report


class Converter(ABC):
    """One foreign format. A new `version` makes existing copies be converted again."""

    name: str
    version: int

    @abstractmethod
    def accepts(self, path: Path) -> bool:
        """Whether `path` (a file or folder) is in this format, judged without reading much."""

    @abstractmethod
    def convert(self, path: Path, folder: Path, report: Report) -> None:
        """Fill the empty `folder`. Raises `ModelError`."""


def run_module(module: str, path: Path, folder: Path) -> None:
    """Run `python -m module path folder`: a conversion needs torch, which this process shall not import.

    Raises `ModelError` with the last line that the module printed to stderr.
    """
    # nothing that a converted file names may be fetched behind the user's back
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-m", module, str(path), str(folder)]
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment
    )
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        raise ModelError(f"{path.name} cannot be converted: {lines[-1]}")
