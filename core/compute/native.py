"""C++ kernels compiled at first use with the machine's own compiler and kept in the cache.

    load_library        a kernel's source -> its shared library, loaded; raises KernelUnavailable with the reason
    load_avx2_library   the same for a source that needs AVX2 and OpenMP

A kernel is an accelerated path beside one in torch, so whatever goes wrong here costs speed and nothing else: callers
catch KernelUnavailable and go on without.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
from pathlib import Path

import torch

from polymux.core.errors import PolymuxError
from polymux.core.models.cache import build_once, find_entry

COMPILERS = ("g++", "c++", "clang++")
"""GNU first: its OpenMP is the one that torch brings on Linux."""

AVX2_FLAGS = ("-mavx2", "-mfma", "-ffp-contract=off", "-fopenmp")
"""Nothing is contracted unasked: the same source line rounds the same in a loop's body and in its tail."""

TIMEOUT = 120
"""Seconds a compilation may take."""


class KernelUnavailable(PolymuxError):
    """The kernel cannot run here; the message says why."""

    code = "kernel_unavailable"


def load_library(source: Path, flags: tuple[str, ...]) -> ctypes.CDLL:
    """The shared library of one C++ file. Processes that meet here build it once; see `build_once`.

    `-fopenmp` may be among the flags. The OpenMP runtime is not linked: its symbols come from the one that torch has
    loaded, since two thread pools would fight for the same cores.
    """
    code = source.read_bytes()
    identity = f"{platform.machine()} {' '.join(flags)} {hashlib.sha256(code).hexdigest()}"
    entry = find_entry("kernels", f"{source.stem} {hashlib.sha256(identity.encode()).hexdigest()[:16]}")
    try:
        build_once(entry, lambda folder: _compile(source, flags, folder))
        return ctypes.CDLL(str(entry / "kernel.so"))
    except KernelUnavailable:
        raise
    except (PolymuxError, OSError) as error:
        raise KernelUnavailable(f"the compiled {source.name} cannot be used: {error}") from error


def load_avx2_library(source: Path) -> ctypes.CDLL:
    """The shared library of a file that is written for AVX2 and FMA. Raises `KernelUnavailable` on any other CPU."""
    capability = torch.backends.cpu.get_cpu_capability()
    if platform.machine() not in ("x86_64", "AMD64") or not capability.startswith("AVX"):
        raise KernelUnavailable(f"{source.name} needs AVX2; this CPU offers {platform.machine()} {capability}")
    return load_library(source, AVX2_FLAGS)


def find_compiler() -> str:
    """`CXX`, else the first compiler on the path."""
    for name in filter(None, (os.environ.get("CXX"), *COMPILERS)):
        if path := shutil.which(name):
            return path
    raise KernelUnavailable(f"no C++ compiler was found (looked for $CXX, {', '.join(COMPILERS)})")


def _compile(source: Path, flags: tuple[str, ...], folder: Path) -> None:
    compiler = find_compiler()
    object_file = folder / "kernel.o"
    _call([compiler, "-std=c++17", "-O3", "-fPIC", *flags, "-c", str(source), "-o", str(object_file)])
    _call([compiler, "-shared", str(object_file), "-o", str(folder / "kernel.so")])
    object_file.unlink()


def _call(command: list[str]) -> None:
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=TIMEOUT)
    except subprocess.CalledProcessError as error:
        raise KernelUnavailable(f"{command[0]} failed: {error.stderr.strip()[-2000:]}") from error
    except subprocess.TimeoutExpired as error:
        raise KernelUnavailable(f"{command[0]} took more than {TIMEOUT} seconds") from error
