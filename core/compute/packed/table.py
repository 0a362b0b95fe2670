"""Which attention is fastest on this device, measured: a small table in the cache, one line per case."""

from __future__ import annotations

import json
import logging
import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import msgspec
import torch

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, PackedRows
from polymux.core.compute.packed.probe import describe
from polymux.core.models.cache import find_entry

log = logging.getLogger("polymux.compute")

TOKENS = {"cuda": 8192, "cpu": 1024}
"""Tokens of the batch that is measured, on each kind of device."""

RUNS = 5

SHORTEST = 64


@dataclass(frozen=True)
class Case:
    """What the choice depends on. `length` is that of the longest row, rounded up to a power of two."""

    dtype: torch.dtype
    dim: int
    heads: int
    kv_heads: int
    options: AttentionOptions
    length: int

    @property
    def name(self) -> str:
        kind = describe(self.options)
        heads = f"{self.heads}/{self.kv_heads}x{self.dim}"
        return f"{str(self.dtype).removeprefix('torch.')}, {heads}, {kind}, {self.length} tokens"


def round_length(length: int) -> int:
    return max(SHORTEST, 1 << (length - 1).bit_length())


class Verdict(msgspec.Struct, frozen=True):
    """Milliseconds of every backend that was measured; the fastest is used."""

    milliseconds: dict[str, float]

    @property
    def fastest(self) -> str:
        return min(self.milliseconds, key=lambda name: self.milliseconds[name])


class Table:
    """The verdicts of one device under one torch. Reads its file once; what cannot be read or written is no error."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.verdicts = self._read()

    @property
    def path(self) -> Path:
        kind = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else self.device.type
        return find_entry("attention", f"{kind} torch {torch.__version__}").with_suffix(".json")

    def choose(self, case: Case, candidates: Sequence[AttentionBackend]) -> AttentionBackend:
        """The fastest of `candidates`, which all claim the case; measured unless the table knows all of them."""
        by_name = {backend.name: backend for backend in candidates}
        verdict = self.verdicts.get(case.name)
        if verdict is None or not by_name.keys() <= verdict.milliseconds.keys():
            verdict = self._measure(case, candidates)
        known = {name: cost for name, cost in verdict.milliseconds.items() if name in by_name}
        return by_name[Verdict(known).fastest] if known else candidates[0]

    def lines(self) -> list[str]:
        """The table for people, one case a line, fastest first."""
        return [
            f"{name}: " + ", ".join(f"{each} {cost:.3g} ms" for each, cost in sorted(
                verdict.milliseconds.items(), key=lambda item: item[1]
            ))
            for name, verdict in sorted(self.verdicts.items())
        ]  # fmt: skip

    def _measure(self, case: Case, candidates: Sequence[AttentionBackend]) -> Verdict:
        costs = {}
        for backend in candidates:
            try:
                costs[backend.name] = measure(backend, case, self.device)
            except Exception as error:  # what fails at this size is no candidate for it
                log.warning("attention %s was not measured for %s: %s", backend.name, case.name, error)
                costs[backend.name] = float("1e9")
        verdict = self.verdicts[case.name] = Verdict(costs)
        self._write()
        return verdict

    def _read(self) -> dict[str, Verdict]:
        try:
            return msgspec.json.decode(self.path.read_bytes(), type=dict[str, Verdict])
        except (OSError, msgspec.MsgspecError):
            return {}

    def _write(self) -> None:
        path = self.path
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
                json.dump({name: msgspec.to_builtins(each) for name, each in self.verdicts.items()}, file, indent=1)
            os.replace(file.name, path)
        except OSError as error:
            log.warning("the table of attention backends cannot be kept: %s", error)


def measure(backend: AttentionBackend, case: Case, device: torch.device) -> float:
    """Milliseconds of one layer's attention over rows of up to the case's length, the median of some runs."""
    starts = draw_rows(case.length, TOKENS[device.type])
    merged = torch.randn(starts[-1], case.heads + 2 * case.kv_heads, case.dim, device=device).to(case.dtype)
    query, key, value = merged.split([case.heads, case.kv_heads, case.kv_heads], dim=1)
    edges = torch.tensor(starts, dtype=torch.int32, device=device)
    options = replace(case.options, sinks=None if case.options.sinks is None else case.options.sinks.to(device))
    times = []
    with torch.inference_mode():
        for _ in range(RUNS + 2):
            rows = PackedRows(starts, edges)
            wait(device)
            began = time.perf_counter()
            backend.packed(query, key, value, rows, options)
            wait(device)
            times.append((time.perf_counter() - began) * 1e3)
    return sorted(times[2:])[RUNS // 2]


def draw_rows(longest: int, tokens: int) -> list[int]:
    """Where rows start, of lengths as requests have them: all kinds up to the longest, some `tokens` together."""
    draw = Random(0)
    starts = [0, longest]
    while starts[-1] < tokens:
        starts.append(starts[-1] + draw.randint(max(1, longest // 16), longest))
    return starts


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
