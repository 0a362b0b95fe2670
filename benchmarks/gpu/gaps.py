"""What a trace of steady decode says: is the card ever idle between steps, and does the host launch ahead?

busy          share of the window in which some kernel ran
idle          from the last kernel of a step to the first of the next, microseconds
lead          how long before the end of one step the next is launched, microseconds; below zero the card waits
host waits    what the host spends in synchronising calls, a step, microseconds: it reads the step before last
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

STEPS = 64
LAUNCH = "cudaGraphLaunch"


def trace_steps(step: Callable[[], object], steps: int = STEPS) -> dict[str, Any]:
    """Runs `step` so many times under the profiler: a summary of the trace."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        profile.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return summarise([event for event in events if event.get("ph") == "X"])


def summarise(events: list[dict[str, Any]]) -> dict[str, Any]:
    """From the complete events of a chrome trace; times in microseconds."""
    kernels = sorted(
        (event["ts"], event["ts"] + event["dur"])
        for event in events
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")
    )
    launches = sorted(event["ts"] for event in events if event["name"] == LAUNCH)
    waits = [event["dur"] for event in events if "Synchronize" in event["name"] and event.get("cat") == "cuda_runtime"]
    if len(kernels) < 2 or len(launches) < 3:
        return {"steps": len(launches), "kernels": len(kernels)}
    merged = [list(kernels[0])]
    for begin, end in kernels[1:]:
        if begin <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([begin, end])
    busy = sum(end - begin for begin, end in merged)
    gaps = sorted((second[0] - first[1] for first, second in pairwise(merged)), reverse=True)
    between = gaps[: len(launches) - 1]  # the largest are those between steps, at worst
    # a step's kernels begin after its launch, and after those of the step before
    bounds = [max((end for begin, end in merged if begin < launch), default=launch) for launch in launches[1:]]
    leads = [end - launch for launch, end in zip(launches[1:], bounds)]
    return {
        "steps": len(launches),
        "kernels": len(kernels),
        "step_us": (kernels[-1][1] - kernels[0][0]) / len(launches),
        "busy_percent": 100 * busy / (merged[-1][1] - merged[0][0]),
        "idle_us_median": statistics.median(between),
        "idle_us_max": between[0],
        "lead_us_median": statistics.median(leads),
        "lead_us_min": min(leads),
        "host_waits_us": sum(waits) / len(launches),
    }
