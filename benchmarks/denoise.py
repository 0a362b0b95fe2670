"""Denoising steps of a transformer of FLUX.1-dev's shape with random weights, through the engine's own loop.

Measured in steady state, rows at different timesteps: time of a launch, per picture, alone and among others, with
and without step caches. The peer is diffusers' forward of the same module with the same compiled blocks, one picture
at a time, in the same run. Needs an accelerator.

    python benchmarks/denoise.py [--out results.jsonl] [--eager]
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel
from ledger import RESULTS, record

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.cache.stepcache import FirstBlock, StepMask, StepRule
from polymux.core.compute.device import CudaDevice
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.denoising import DenoiseProgram, DenoiseWork, flow_scheduler
from polymux.core.testing.drive import Driver
from polymux.modalities.diffusion import flux

TEXT = 512
STEPS = 200
"""More than any measurement runs, so that every row is in its steady state."""

EVERY_OTHER = StepMask(mask=(True, False) * (STEPS // 2), tail=0)
FIRST_BLOCK = FirstBlock(threshold=float("inf"), max_skips=1, tail=0)
"""Measures as it does in service, and then skips every other step."""


@dataclass(frozen=True)
class Case:
    """`rows` pictures of `side` pixels, joining one launch apart."""

    name: str
    side: int
    rows: int
    rule: StepRule | None = None


CASES = [
    Case("1024", 1024, 1),
    Case("1024, every other step skipped", 1024, 1, EVERY_OTHER),
    Case("1024, first block, every other step skipped", 1024, 1, FIRST_BLOCK),
    Case("512", 512, 1),
    Case("512, 8 concurrent", 512, 8),
    Case("512, 8 concurrent, every other step skipped", 512, 8, EVERY_OTHER),
    Case("512, 8 concurrent, first block, every other step skipped", 512, 8, FIRST_BLOCK),
]


def build_transformer() -> FluxTransformer2DModel:
    """FLUX.1-dev's configuration, bfloat16, weights drawn in place on the device."""
    with torch.device("meta"):
        model = FluxTransformer2DModel(guidance_embeds=True).to(torch.bfloat16)
    model = model.to_empty(device="cuda").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model


def make_request(case: Case, seed: int) -> DenoiseRequest:
    shape = (16, case.side // 8, case.side // 8)
    conditions = {
        flux.PROMPT: torch.randn(TEXT, 4096, device="cuda", dtype=torch.bfloat16),
        flux.POOLED: torch.randn(768, device="cuda", dtype=torch.bfloat16),
        flux.GUIDANCE: torch.tensor(3.5, device="cuda"),
    }
    schedule = flux.make_schedule(flow_scheduler(), STEPS, shape)
    return DenoiseRequest(shape, schedule, (conditions,), seed=seed, rule=case.rule, publish=True)


def measure(run: Callable[[], Any], times: int) -> float:
    """Milliseconds of one run, over `times` of them."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(times):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - begin) * 1e3 / times


def measure_case(case: Case, model: flux.FluxDenoiser) -> dict[str, Any]:
    """Milliseconds of a launch in steady state, and the waits for the device that torch noticed in it."""
    site = Site(CudaDevice("cuda"), SiteSettings(cache_bytes=2 << 30))
    requests = {str(row): make_request(case, row) for row in range(case.rows)}
    stage = DenoiseStage("denoise", model, site, max_units=20_000)
    driver = Driver(Loop(site, {"flux": DenoiseProgram(stage, requests)}))
    for name in requests:
        driver.submit(name, "flux", "denoise", DenoiseWork([name]))
        driver.step()
    driver.run(steps=16)
    launch = measure(driver.step, 32)
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        driver.run(steps=4)
    torch.cuda.set_sync_debug_mode("default")
    for name in requests:
        if driver.error(name) is not None:
            raise driver.error(name)
        driver.cancel(name)
    driver.finish()
    places = sorted({f"{Path(warning.filename).name}:{warning.lineno}" for warning in caught})
    return {"launch_ms": launch, "picture_ms": launch / case.rows, "waits": len(caught) / 4, "waits_at": places}


def measure_peer(side: int, model: FluxTransformer2DModel) -> float:
    """diffusers' forward, one picture."""
    tokens = (side // 16) ** 2
    options = {"device": "cuda", "dtype": torch.bfloat16}
    inputs = {
        "hidden_states": torch.randn(1, tokens, 64, **options),
        "encoder_hidden_states": torch.randn(1, TEXT, 4096, **options),
        "pooled_projections": torch.randn(1, 768, **options),
        "timestep": torch.full((1,), 0.5, **options),
        "guidance": torch.full((1,), 3.5, device="cuda"),
        "img_ids": torch.zeros(tokens, 3, **options),
        "txt_ids": torch.zeros(TEXT, 3, **options),
        "return_dict": False,
    }
    with torch.inference_mode():
        measure(lambda: model(**inputs), 4)
        return measure(lambda: model(**inputs), 24)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--eager", action="store_true", help="do not compile the blocks")
    arguments = parser.parse_args()
    transformer = build_transformer()
    if not arguments.eager:
        torch._dynamo.config.recompile_limit = 64
        transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    model = flux.FluxDenoiser(transformer)
    peers = {side: measure_peer(side, transformer) for side in (1024, 512)}
    for case in CASES:
        result = measure_case(case, model)
        print(f"{case.name:60} {result}  peer {peers[case.side]:.1f}", flush=True)
        record(
            "denoise",
            f"FLUX.1-dev shape, {case.name}: one step of one picture",
            result["picture_ms"],
            "ms",
            peer=f"diffusers, one picture at a time, {'eager' if arguments.eager else 'compiled'}",
            peer_value=peers[case.side],
            hardware=torch.cuda.get_device_name(),
            results=arguments.out,
        )


if __name__ == "__main__":
    main()
