"""Whether a backend really computes attention here, found by a small real call and not by its version.

A wheel may import and hold no kernel for this card, this dtype, or this option: the call is what tells.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from polymux.core.compute.attention import AttentionOptions, PackedRows
from polymux.core.compute.sdpa import SdpaAttention

if TYPE_CHECKING:
    from polymux.core.compute.attention import AttentionBackend

LENGTHS = (3, 40)
"""Tokens of the rows that a backend is tried with."""

TOLERANCE = 0.05
"""Largest difference from the reference in float32; values are of unit variance."""


def describe(options: AttentionOptions) -> str:
    """What distinguishes one kind of attention from another, in words: "causal, window"."""
    kinds = [
        "causal" if options.causal else "both ways",
        *(["window"] if options.window is not None else []),
        *(["soft cap"] if options.softcap is not None else []),
        *(["sinks"] if options.sinks is not None else []),
    ]
    return ", ".join(kinds)


def try_packed(
    backend: AttentionBackend, device: torch.device, dtype: torch.dtype, dim: int, options: AttentionOptions
) -> str | None:
    """Why `backend` cannot compute this kind of attention, or None. Asked once a process."""
    kind = AttentionOptions(
        1.0,
        causal=options.causal,
        window=None if options.window is None else 8,
        softcap=None if options.softcap is None else 4.0,
    )
    return _try(backend, str(device), dtype, dim, kind, options.sinks is not None)


@functools.cache
def _try(
    backend: AttentionBackend, device: str, dtype: torch.dtype, dim: int, kind: AttentionOptions, sinks: bool
) -> str | None:
    generator = torch.Generator().manual_seed(0)
    merged = torch.randn(sum(LENGTHS), 8, dim, generator=generator).to(device, dtype)
    query, key, value = merged.split([4, 2, 2], dim=1)
    edges = torch.tensor([0, LENGTHS[0], sum(LENGTHS)], dtype=torch.int32, device=device)
    rows = PackedRows(edges.tolist(), edges)
    options = replace(kind, scale=dim**-0.5, sinks=torch.linspace(-1, 1, 4).to(device, dtype) if sinks else None)
    try:
        with torch.inference_mode():
            found = backend.packed(query, key, value, rows, options).float()
            exact = SdpaAttention().packed(query.float(), key.float(), value.float(), rows, options)
            worst = (found - exact).abs().max().item()
    except Exception as error:  # a build without the kernel says so in its own way
        return f"{describe(options)}: {type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if not worst <= TOLERANCE:
        return f"{describe(options)}: its results are off by {worst:.2g}"
    return None
