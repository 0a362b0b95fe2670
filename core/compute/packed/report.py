"""What `polymux doctor` says of attention: who serves this device, who does not and why, and who is fastest."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from polymux.core.compute.attention import AttentionBackend, AttentionOptions, explain_refusal
from polymux.core.compute.packed.choice import MeasuredAttention, choose_packed
from polymux.core.compute.packed.table import Case, Table

COMMON = [(64, 256), (128, 256), (128, 4096)]
"""Head dimensions and lengths of rows that are measured."""


def report_attention(backends: Iterable[AttentionBackend], *, measure: bool) -> dict[str, list[str]]:
    """`serving` names, best first; `refused` and `table` a line each. `measure` measures the common cases anew."""
    backends = list(backends)
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    reasons = {backend.name: explain_refusal(backend, device, dtype, 64) for backend in backends}
    table = Table(device)
    if measure:
        table.verdicts.clear()
        for dim, length in COMMON:
            _measure(table, choose_packed(backends, device, dtype, dim), dtype, dim, length)
    serving = [name for name, reason in reasons.items() if reason is None]
    return {
        "serving": [*serving, "sdpa (reference)"],
        "refused": [f"not {name}: {reason}" for name, reason in reasons.items() if reason is not None],
        "table": table.lines(),
    }


def _measure(table: Table, chosen: AttentionBackend, dtype: torch.dtype, dim: int, length: int) -> None:
    if not isinstance(chosen, MeasuredAttention):  # nobody else can: there is nothing to choose
        return
    for causal in (True, False):
        options = AttentionOptions(dim**-0.5, causal=causal)
        able = chosen.able(dtype, dim, options, table.device)
        if len(able) > 1:
            table.choose(Case(dtype, dim, 16, 8, options, length), able)
