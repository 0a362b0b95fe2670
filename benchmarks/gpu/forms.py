"""Timing forms of one model: milliseconds a picture, what the first pass took, and where a pass spends its time."""

from __future__ import annotations

import gc
import json
import os
import re
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "attention_ms": re.compile(r"sdpa|flash|fmha|attention", re.I),
    "products_ms": re.compile(r"gemm|nvjet|cutlass|xmma|cublas|matmul|addmm|aten::mm|linear|conv|splitk|gemv", re.I),
}
"""Kinds of kernels by name; what matches none is elementwise work."""

SLOWEST = 8
"""Kernels that a profile names."""


class Bench:
    """Where figures go, and what they are measured on."""

    def __init__(
        self,
        out: Path | None,
        tiny: bool,
        seconds: float,
        targets: dict[str, float],
        peers: dict[str, float],
        wanted: str = "",
        limit: float = float("inf"),
    ) -> None:
        """`seconds`: for the timed passes of one form (three passes at least, twenty at most). `targets` and `peers`:
        milliseconds by case, to stand beside what is measured. `wanted`: a pattern of the forms that are measured.
        `limit`: seconds after which no form begins."""
        self.targets = targets
        self.peers = peers
        self.out = out
        self.tiny = tiny
        self.kernels = not tiny or os.environ.get("TRITON_INTERPRET") == "1"
        """Whether our kernels can run."""
        self.seconds = seconds
        self.pattern = re.compile(wanted)
        self.end = time.perf_counter() + limit
        self.device = torch.device("cpu" if tiny else "cuda")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.hardware = "CPU" if tiny else torch.cuda.get_device_name()

    def tell(self, case: str, form: str, **figures: Any) -> None:
        line = {"case": case, "form": form, **figures, "torch": torch.__version__, "hardware": self.hardware}
        if not self.tiny:
            line |= {"target_ms": self.targets.get(case), "peer_ms": self.peers.get(case)}
        text = json.dumps({key: value for key, value in line.items() if value is not None})
        print(text, flush=True)
        if self.out is not None:
            with self.out.open("a") as file:
                file.write(text + "\n")

    def wants(self, *names: str) -> bool:
        """Whether one of these forms is measured, so that what it needs is worth building."""
        return time.perf_counter() < self.end and any(map(self.pattern.search, names))

    def form(self, case: str, name: str, run: Callable[[], Any], share: int = 1, than: float | None = None) -> float:
        """Time one form: first pass (with what it compiles), then milliseconds a picture over some passes, which are
        returned (0 after an error, or if it is not wanted). `than`: milliseconds of what it is compared with."""
        if not self.wants(name):
            return 0.0
        try:
            with torch.inference_mode():
                begin = time.perf_counter()
                run()
                self.wait()
                first = time.perf_counter() - begin
                for _ in range(0 if self.tiny else 3):  # also lets a replay record
                    run()
                self.wait()
                begin = time.perf_counter()
                run()
                self.wait()
                times = 1 if self.tiny else min(20, max(3, int(self.seconds / (time.perf_counter() - begin))))
                begin = time.perf_counter()
                for _ in range(times):
                    run()
                self.wait()
            ms = (time.perf_counter() - begin) * 1e3 / times / share
            peak = 0.0 if self.tiny else torch.cuda.max_memory_allocated() / 2**30
            faster = round(than / ms, 2) if than else None
            self.tell(case, name, ms=round(ms, 2), faster=faster, first_s=round(first, 1), peak_gib=round(peak, 1))
            return ms
        except Exception as error:
            traceback.print_exc()
            self.tell(case, name, error=f"{type(error).__name__}: {error}"[:300])
            return 0.0

    def parts(self, case: str, name: str, run: Callable[[], Any], share: int = 1) -> None:
        """Where the device's time goes in one pass, by kind of kernel and by the slowest ones."""
        if not self.wants(f"{name}: parts"):
            return
        kind = ProfilerActivity.CPU if self.tiny else ProfilerActivity.CUDA
        try:
            with torch.inference_mode(), profile(activities=[kind]) as profiled:
                run()
                self.wait()
        except Exception as error:
            self.tell(case, f"{name}: parts", error=f"{type(error).__name__}: {error}"[:300])
            return
        spent: dict[str, float] = {}
        for event in profiled.key_averages():
            ms = (event.self_cpu_time_total if self.tiny else event.self_device_time_total) / 1e3 / share
            spent[event.key] = spent.get(event.key, 0.0) + ms
        kinds = dict.fromkeys([*PARTS, "elementwise_ms"], 0.0)
        for kernel, ms in spent.items():
            found = next((part for part, pattern in PARTS.items() if pattern.search(kernel)), "elementwise_ms")
            kinds[found] += ms
        slowest = sorted(spent.items(), key=lambda each: -each[1])[:SLOWEST]
        self.tell(
            case,
            f"{name}: parts",
            **{part: round(ms, 2) for part, ms in kinds.items()},
            slowest={kernel[:60]: round(ms, 2) for kernel, ms in slowest},
        )

    def wait(self) -> None:
        if not self.tiny:
            torch.cuda.synchronize()

    def build(self, make: Callable[[], torch.nn.Module], tiny: Callable[[], Any]) -> Any:
        """The model in its real shape, weights drawn in place on the device."""
        if self.tiny:
            return tiny()
        with torch.device("meta"):
            model = make().to(self.dtype)
        model = model.to_empty(device=self.device).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        return model

    def free(self) -> None:
        gc.collect()
        torch._dynamo.reset()
        if not self.tiny:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def normal(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        return torch.randn(*shape, device=self.device, dtype=dtype or self.dtype)
