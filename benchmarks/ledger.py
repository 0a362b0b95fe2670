"""Where every benchmark writes its figures: `results/RESULTS.jsonl`, one object a line."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path

RESULTS = Path(__file__).parent / "results" / "RESULTS.jsonl"


def describe_cpu() -> str:
    """Cores and kind of this machine's processor, without its name: figures of a CPU are ratios."""
    return f"{os.cpu_count()} CPU cores, {platform.machine()}"


def record(
    benchmark: str,
    metric: str,
    value: float,
    unit: str,
    *,
    peer: str | None = None,
    peer_value: float | None = None,
    hardware: str | None = None,
    results: Path = RESULTS,
) -> None:
    """Append one figure, with the peer's from the same run, today's date and the commit it was measured at."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    # a copy of the tree without its history has no commit to name
    commit = subprocess.run(command, cwd=RESULTS.parents[2], capture_output=True, text=True, check=False).stdout.strip()
    line = {
        "benchmark": benchmark,
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "peer": peer,
        "peer_value": None if peer_value is None else round(peer_value, 4),
        "hardware": hardware or describe_cpu(),
        "date": datetime.date.today().isoformat(),
        "commit": commit or None,
    }
    results.parent.mkdir(parents=True, exist_ok=True)
    with results.open("a") as file:
        file.write(json.dumps(line) + "\n")
