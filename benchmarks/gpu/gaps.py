"""What a trace of steady decode says: is the card ever idle between steps, and does the host launch ahead?

busy          share of the window in which some kernel ran
idle          from the last kernel of a step to the first of the next, microseconds
lead          how long before the end of one step the next is launched, microseconds; below zero the card waits
host waits    what the host spends in synchronising calls, a step, microseconds: it reads the step before last
"""

from __future__ import annotations

import json
import math
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
    launched = {event["args"]["correlation"]: event["ts"] for event in events if event["name"] == LAUNCH}
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = sorted((event["ts"], event["ts"] + event["dur"]) for event in kernels)
    waits = [event["dur"] for event in events if "Synchronize" in event["name"] and event.get("cat") == "cuda_runtime"]
    # all kernels of a recorded step bear the number of the call that launched it
    steps: dict[int, tuple[float, float]] = {}
    for event in kernels:
        number = event["args"].get("correlation")
        if number in launched:
            begin, end = steps.get(number, (math.inf, -math.inf))
            steps[number] = min(begin, event["ts"]), max(end, event["ts"] + event["dur"])
    if len(steps) < 3:
        return {"steps": len(steps), "kernels": len(spans)}
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    order = sorted(steps, key=lambda number: launched[number])
    idle = [steps[second][0] - steps[first][1] for first, second in pairwise(order)]
    leads = [steps[first][1] - launched[second] for first, second in pairwise(order)]
    return {
        "steps": len(steps),
        "kernels": len(spans),
        "step_us": (end - spans[0][0]) / len(steps),
        "busy_percent": 100 * busy / (end - spans[0][0]),
        "idle_us_median": statistics.median(idle),
        "idle_us_max": max(idle),
        "lead_us_median": statistics.median(leads),
        "lead_us_min": min(leads),
        "host_waits_us": sum(waits) / len(steps),
    }
