"""Pictures that arrive as people ask: a Poisson trace of mixed sizes and step counts, by our loop and by a server that
takes them first come, first served, one at a time with diffusers' own transformer.

The trace's rate is 80% of what the other can do. Latency is from arrival to the last step; both run the same
transformer, in the same process, one after the other, in real time. On CUDA the shape is FLUX.1-dev's, compiled on both
sides; on a CPU it is a tiny one, and the figure is the ratio.

PYTHONPATH=benchmarks python benchmarks/diffusion_arrivals.py [--requests 60] [--seed 0] [--out results.jsonl]
"""

from __future__ import annotations

import argparse
import random
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FluxTransformer2DModel
from ledger import RESULTS, record

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest, Trajectory
from polymux.core.compute.device import open_device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.denoising import DenoiseProgram, DenoiseWork, flow_scheduler, tiny_flux
from polymux.core.testing.drive import Driver
from polymux.core.vocabulary import Ended
from polymux.modalities.diffusion import flux
from polymux.modalities.diffusion.merged import compile_blocks

LOAD = 0.8
"""Of the other server's capacity."""

KINDS = ((512, 4, 0.25), (512, 20, 0.35), (768, 20, 0.15), (1024, 28, 0.2), (1024, 50, 0.05))
"""Side in pixels, steps, and share of the requests."""


@dataclass(frozen=True)
class Arrival:
    """A request at a second of the trace."""

    name: str
    side: int
    steps: int
    at: float


class Bench:
    """A transformer, and the requests for it."""

    def __init__(self, cuda: bool) -> None:
        self.device = torch.device("cuda" if cuda else "cpu")
        self.dims = (512, 4096, 768, 16) if cuda else (5, 12, 10, 4)
        self.dtype = torch.bfloat16 if cuda else torch.float32
        self.shrink = 8 if cuda else 128

    def build(self) -> FluxTransformer2DModel:
        if self.device.type == "cpu":
            return tiny_flux(layers=4)
        with torch.device("meta"):
            model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
        model = model.to_empty(device="cuda").eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.normal_(0.0, 0.02)
        return model

    def request(self, arrival: Arrival) -> DenoiseRequest:
        text, joint, pooled, channels = self.dims
        shape = (channels, arrival.side // self.shrink, arrival.side // self.shrink)
        conditions = {
            flux.PROMPT: torch.randn(text, joint, device=self.device, dtype=self.dtype),
            flux.POOLED: torch.randn(pooled, device=self.device, dtype=self.dtype),
            flux.GUIDANCE: torch.tensor(3.5, device=self.device),
        }
        schedule = flux.make_schedule(flow_scheduler(), arrival.steps, shape)
        return DenoiseRequest(shape, schedule, (conditions,), seed=1, publish=False)

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


def paint_alone(bench: Bench, model: Any, request: DenoiseRequest) -> None:
    """All steps of one picture, as diffusers' pipeline calls its transformer."""
    trajectory = Trajectory(request, bench.device)
    condition = request.conditions[0]
    grid = (request.shape[1] // 2, request.shape[2] // 2)
    places = torch.zeros(grid[0] * grid[1], 3, device=bench.device)
    places[:, 1] = torch.arange(grid[0], device=bench.device).repeat_interleave(grid[1])
    places[:, 2] = torch.arange(grid[1], device=bench.device).repeat(grid[0])
    fixed = {
        "encoder_hidden_states": condition[flux.PROMPT][None],
        "pooled_projections": condition[flux.POOLED][None],
        "guidance": condition[flux.GUIDANCE][None],
        "img_ids": places,
        "txt_ids": torch.zeros(len(condition[flux.PROMPT]), 3, device=bench.device),
        "return_dict": False,
    }
    with torch.inference_mode():
        for time_ in trajectory.clock:
            tokens = flux.pack_latents(trajectory.latents).to(bench.dtype)
            predicted = model(hidden_states=tokens, timestep=(time_ / 1000)[None].to(bench.dtype), **fixed)[0]
            trajectory.advance(flux.unpack_latents(predicted.float(), grid))
    bench.wait()


def serve_in_turn(bench: Bench, model: Any, trace: list[Arrival]) -> dict[str, float]:
    """Latency in seconds by request: first come, first served."""
    requests = {arrival.name: bench.request(arrival) for arrival in trace}
    begin = time.perf_counter()
    latencies = {}
    for arrival in trace:
        time.sleep(max(arrival.at - (time.perf_counter() - begin), 0.0))
        paint_alone(bench, model, requests[arrival.name])
        latencies[arrival.name] = time.perf_counter() - begin - arrival.at
    return latencies


def serve_together(bench: Bench, model: flux.FluxDenoiser, trace: list[Arrival]) -> dict[str, float]:
    """The same by our loop."""
    site = Site(open_device(bench.device.type), SiteSettings(cache_bytes=1 << 26))
    knee = 8192 if bench.device.type == "cuda" else 160
    stage = DenoiseStage("denoise", model, site, max_units=knee)
    requests = {arrival.name: bench.request(arrival) for arrival in trace}
    driver = Driver(Loop(site, {"m": DenoiseProgram(stage, requests)}))
    begin = time.perf_counter()
    ahead = deque(trace)
    due: dict[str, float] = {}
    latencies: dict[str, float] = {}
    while len(latencies) < len(trace):
        now = time.perf_counter() - begin
        while ahead and ahead[0].at <= now:
            arrival = ahead.popleft()
            driver.submit(arrival.name, "m", "denoise", DenoiseWork([arrival.name]))
            due[arrival.name] = arrival.at
        if not driver.step() and ahead:
            time.sleep(max(min(ahead[0].at - (time.perf_counter() - begin), 0.01), 0.0))
        for name in [name for name in due if driver.reports[name] and isinstance(driver.reports[name][-1], Ended)]:
            latencies[name] = time.perf_counter() - begin - due.pop(name)
    driver.finish()
    return latencies


def make_trace(count: int, seed: int, seconds: dict[tuple[int, int], float]) -> list[Arrival]:
    """`seconds`: what each kind takes the other server."""
    draw = random.Random(seed)
    kinds = draw.choices([kind[:2] for kind in KINDS], [kind[2] for kind in KINDS], k=count)
    mean = sum(seconds[kind] for kind in kinds) / count
    at, trace = 0.0, []
    for number, (side, steps) in enumerate(kinds):
        at += draw.expovariate(LOAD / mean)
        trace.append(Arrival(str(number), side, steps, at))
    return trace


def time_run(run: Callable[[], Any]) -> float:
    run()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    cuda = torch.cuda.is_available()
    bench = Bench(cuda)
    transformer = bench.build()
    if cuda:
        torch._dynamo.config.recompile_limit = 64
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    kinds = {(side, steps): Arrival("", side, steps, 0.0) for side, steps, _ in KINDS}
    alone = {
        kind: time_run(lambda arrival=arrival: paint_alone(bench, transformer, bench.request(arrival)))
        for kind, arrival in kinds.items()
    }
    trace = make_trace(arguments.requests, arguments.seed, alone)
    theirs = serve_in_turn(bench, transformer, trace)
    model = flux.FluxDenoiser(transformer)
    blocks = model.merge()
    if cuda:
        torch._dynamo.reset()
        compile_blocks(blocks)
        for side in (512, 768, 1024):  # all shapes once, before the clock starts
            warm = [Arrival(f"{side} {row}", side, 4, 0.0) for row in range(8)]
            serve_together(bench, model, warm)
    ours = serve_together(bench, model, trace)
    figures = {
        name: np.percentile(list(each.values()), [50, 95]) for name, each in (("ours", ours), ("theirs", theirs))
    }
    for place, share in enumerate(("p50", "p95")):
        record(
            "diffusion_arrivals",
            f"{share} latency of {len(trace)} Poisson arrivals at {LOAD:.0%} of the peer's capacity, mixed sizes and "
            f"steps, {'FLUX.1-dev shape' if cuda else 'tiny FLUX'}",
            float(figures["ours"][place]),
            "s",
            peer="diffusers, first come, first served, one at a time" + (", compiled" if cuda else ""),
            peer_value=float(figures["theirs"][place]),
            hardware=torch.cuda.get_device_name() if cuda else None,
            results=arguments.out,
        )
        print(
            share, figures["ours"][place], figures["theirs"][place], figures["theirs"][place] / figures["ours"][place]
        )


if __name__ == "__main__":
    main()
