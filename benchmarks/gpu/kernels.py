"""Where the time of a run goes on a card: kernels by kind and by name, recorded steps, and what the host did meanwhile.

busy           share of the run in which some kernel ran
recorded step  one launch of a recorded graph: its kernels, and microseconds from the first to the last of them
host waits     share of the run that the host spent in synchronising calls; the rest it was busy itself
idle           stretches in which no kernel ran, those of one kind together: between which kernels, how long after the
               card fell idle the next was launched (as good as all of it: the host was late), and what the host did
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

KINDS = {
    "attention of the encoder": ("flash", "fmha", "sdpa", "cudnn", "attention", "_attend"),
    "attention of steps": ("_read", "_join"),
    "writing": ("_rotate", "_write"),
    "norms": ("norm",),
    "products": ("gemm", "nvjet", "cutlass", "_multiply", "splitk", "cublas", "gemv", "dot_kernel"),
    "convolutions and fft": ("conv", "fft", "wgrad", "dgrad"),
    "copies": ("memcpy", "copy", "memset", "cat", "fill"),
    "draws and rules": (
        "softmax",
        "reduce",
        "arg",
        "where",
        "masked",
        "index",
        "scatter",
        "gather",
        "_draw",
        "_choose",
    ),
    "elementwise": ("elementwise", "gelu", "vectorized"),
}
"""By parts of a kernel's name; the first that fits."""

LISTED = 40

IDLE_US, IDLES = 300.0, 24
"""Stretches without a kernel that are told one by one: from this long on, the longest so many."""


def sort_out(name: str) -> str:
    lower = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in lower for part in parts)), "others")


def profile(run: Callable[[], object]) -> str:
    """Runs it under the profiler: a report for people."""
    activity = torch.profiler.ProfilerActivity
    cuda = torch.cuda.is_available()
    with torch.profiler.profile(activities=[activity.CPU, *([activity.CUDA] if cuda else [])]) as profiled:
        run()
        if cuda:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "trace.json"
        profiled.export_chrome_trace(str(file))
        events = json.loads(file.read_text())["traceEvents"]
    return tell([event for event in events if event.get("ph") == "X"], cuda)


def tell(events: list[dict[str, Any]], cuda: bool) -> str:
    """From the complete events of a chrome trace; times there are microseconds. Without a card, its operators are
    taken for kernels."""
    kinds = ("kernel", "gpu_memcpy", "gpu_memset") if cuda else ("cpu_op",)
    kernels = sorted((event for event in events if event.get("cat") in kinds), key=lambda event: event["ts"])
    if not kernels:
        return "nothing ran\n"
    start, end = kernels[0]["ts"], max(event["ts"] + event["dur"] for event in kernels)
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    waits = sum(event["dur"] for event in calls if "Synchronize" in event["name"])
    lines = [
        f"{(end - start) / 1e3:.1f} ms from the first kernel to the last, {len(kernels)} kernels, "
        f"busy {_busy(kernels) / (end - start):.1%}; host waits {waits / (end - start):.1%}",
        *_tell_steps(kernels, calls),
        "",
        *_tell_idle(kernels, events),
        "",
    ]
    spent: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    names: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event in kernels:
        for table, key in ((spent, sort_out(event["name"])), (names, event["name"])):
            table[key][0] += event["dur"]
            table[key][1] += 1
    for table, most in ((spent, len(spent)), (names, LISTED)):
        for key, (took, count) in sorted(table.items(), key=lambda item: -item[1][0])[:most]:
            lines.append(f"{took / 1e3:10.2f} ms {count:8.0f} x {took / count:9.2f} us  {key[:110]}")
        lines.append("")
    launching = Counter(event["name"] for event in calls)
    took = Counter[str]()
    for event in calls:
        took[event["name"]] += event["dur"]
    for name, count in launching.most_common(8):
        lines.append(f"host: {took[name] / 1e3:10.2f} ms {count:8d} x {name}")
    return "\n".join(lines) + "\n"


def _tell_steps(kernels: list[dict[str, Any]], calls: list[dict[str, Any]]) -> list[str]:
    """Of recorded steps, by how many kernels they have."""
    graphs = {event["args"].get("correlation") for event in calls if event["name"].startswith("cudaGraphLaunch")}
    steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for event in kernels:
        if event.get("args", {}).get("correlation") in graphs:
            steps[event["args"]["correlation"]].append(event)
    sizes: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for each in steps.values():
        span = max(event["ts"] + event["dur"] for event in each) - each[0]["ts"]
        sizes[len(each)].append((span, _busy(each)))
    lines = []
    for count, found in sorted(sizes.items(), key=lambda item: -len(item[1])):
        spans = sorted(span for span, _ in found)
        tenth = len(spans) // 10
        lines.append(
            f"{len(found)} recorded steps of {count} kernels: {statistics.median(spans):.0f} us, "
            f"{spans[tenth]:.0f} to {spans[-1 - tenth]:.0f}; in kernels "
            f"{statistics.median(busy for _, busy in found):.0f} us"
        )
    eager = len(kernels) - sum(map(len, steps.values()))
    return [*lines[:12], f"{eager} kernels outside of recorded steps"]


def _busy(kernels: list[dict[str, Any]]) -> float:
    """Microseconds in which some kernel ran; kernels in order of their start."""
    busy, until = 0.0, float("-inf")
    for event in kernels:
        end = event["ts"] + event["dur"]
        busy += max(end - max(event["ts"], until), 0.0)
        until = max(until, end)
    return busy


def _tell_idle(kernels: list[dict[str, Any]], events: list[dict[str, Any]]) -> list[str]:
    """Where no kernel ran: how much of it in stretches of which length, and the long ones in order of time."""
    launched: dict[int, float] = {}
    for event in events:
        number = event.get("args", {}).get("correlation")
        if number is not None and event.get("cat") in ("cuda_runtime", "cuda_driver"):
            launched[number] = min(event["ts"], launched.get(number, event["ts"]))
    parts = [event for event in events if event.get("cat") == "user_annotation"]
    gaps: list[tuple[float, float, dict[str, Any], dict[str, Any]]] = []
    last = kernels[0]
    until = last["ts"] + last["dur"]
    for event in kernels[1:]:
        if event["ts"] > until:
            gaps.append((until, event["ts"], last, event))
        if event["ts"] + event["dur"] > until:
            last, until = event, event["ts"] + event["dur"]
    lines = []
    for low, high in ((0.0, 5.0), (5.0, 30.0), (30.0, IDLE_US), (IDLE_US, float("inf"))):
        found = [end - start for start, end, _, _ in gaps if low <= end - start < high]
        lines.append(f"idle {sum(found) / 1e3:9.2f} ms in {len(found)} stretches of {low:.0f} to {high:.0f} us")
    long = sorted(gaps, key=lambda gap: gap[0] - gap[1])[:IDLES]
    for start, end, before, after in sorted(
        (gap for gap in long if gap[1] - gap[0] >= IDLE_US), key=lambda gap: gap[0]
    ):
        late = launched.get(after.get("args", {}).get("correlation"), start) - start
        did = Counter[str]()
        for event in parts:
            did[event["name"]] += max(0.0, min(end, event["ts"] + event["dur"]) - max(start, event["ts"]))
        host = ", ".join(f"{name} {took / 1e3:.2f}" for name, took in did.most_common(5) if took > 20)
        lines.append(
            f"idle {(end - start) / 1e3:7.2f} ms at {(start - kernels[0]['ts']) / 1e3:7.1f}, next launched after "
            f"{late / 1e3:.2f}: {before['name'][:40]} -> {after['name'][:40]}; host: {host}"
        )
    # which part of the work the kernels that begin late belong to, however short the waits are
    starts = sorted(parts, key=lambda part: part["ts"])
    shares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for start, end, _, after in gaps:
        at = launched.get(after.get("args", {}).get("correlation"))
        within = [part["name"] for part in starts if at is not None and part["ts"] <= at <= part["ts"] + part["dur"]]
        share = shares[within[-1] if within else "elsewhere"]
        share[0] += end - start
        share[1] += 1
    for name, (took, count) in sorted(shares.items(), key=lambda item: -item[1][0])[:10]:
        lines.append(f"idle {took / 1e3:9.2f} ms in {count:.0f} stretches before kernels of {name}")
    took = Counter[str]()
    for part in parts:
        took[part["name"]] += part["dur"]
    lines += [f"host {spent / 1e3:9.2f} ms in {name}" for name, spent in took.most_common(16)]
    return lines
