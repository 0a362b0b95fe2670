"""Denoising steps of real shapes with random weights on a CUDA card, each in the forms that we can run it in.

flux-1024, flux-512, flux-512x8   FLUX.1-dev, one picture and eight at different timesteps
wan-480p                          Wan2.1 1.3B, 480x832, 81 frames, one branch
sdxl                              SDXL's UNet, 1024x1024, two branches
engine                            FLUX through the engine's own loop, with and without step caches
attention                         torch's attention backends at these shapes
products                          each matrix product of a FLUX block by itself, in TFLOP/s: what the rest is held to

Forms: `diffusers compiled` is the peer (its own compiled blocks in the same run); ours are `kernels` (merged
projections, our own kernels between the products, nothing compiled; the default) and `compiled` (the same blocks fused
by the compiler), each also as a recorded `graph` (the default for SDXL). FLUX's `kernels` have variants: activation in
a step of its own, text and picture on one stream, a single block's two halves projected together. SDXL is also
measured `merged` (nothing else done) and with its `transformer blocks compiled`. `parts` says where a pass spends its
time.
Cases run in the order given, ours before the peer. Prints a JSON line for each form as soon as it is known, and
appends it to `--out`. A form that fails says so and the others go on. `--forms` is a pattern of those wanted.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/diffusion.py --out diffusion.jsonl [--tiny] [CASE ...]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import FluxTransformer2DModel, UNet2DConditionModel, WanTransformer3DModel
from diffusers.models.attention import BasicTransformerBlock
from forms import Bench
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from polymux.core.batch.denoise import DenoiseStage
from polymux.core.batch.denoiser import BlockModel, DenoiseBatch
from polymux.core.batch.trajectory import DenoiseRequest
from polymux.core.cache.stepcache import FirstBlock, StepMask
from polymux.core.compute.device import open_device
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.testing.denoising import DenoiseProgram, DenoiseWork, flow_scheduler, tiny_flux
from polymux.core.testing.drive import Driver
from polymux.core.testing.pipelines import tiny_unet, tiny_wan
from polymux.modalities.diffusion import encoders, flux, unet, wan
from polymux.modalities.diffusion.merged import compile_blocks

TARGETS = {"flux-1024": 118.0, "flux-512": 38.0, "flux-512x8": 34.0, "wan-480p": 470.0, "sdxl": 36.0}
PEERS = {"flux-1024": 133.0, "flux-512": 43.0, "flux-512x8": 39.0, "wan-480p": 512.0, "sdxl": 38.0}
"""Milliseconds a picture, of diffusers compiled on the same kind of card on another day."""

FLUX = {"guidance_embeds": True}
WAN = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "ffn_dim": 8960,
    "num_layers": 30,
}
SDXL = {
    "sample_size": 128,
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "block_out_channels": (320, 640, 1280),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "transformer_layers_per_block": (1, 2, 10),
    "attention_head_dim": (5, 10, 20),
    "cross_attention_dim": 2048,
    "projection_class_embeddings_input_dim": 2816,
    "addition_time_embed_dim": 256,
}


def run_forms(bench: Bench, case: str, name: str, model: BlockModel, batch: DenoiseBatch) -> None:
    """One form of ours, as it is, recorded, and in parts."""
    share = share_of(case, batch)
    bench.form(case, name, lambda: model.forward(batch), share)
    bench.parts(case, name, lambda: model.forward(batch), share)
    if not bench.tiny:
        model.record()
        bench.form(case, f"{name}, graph", lambda: model.forward(batch), share)
        model.replay = None


def share_of(case: str, batch: DenoiseBatch) -> int:
    """Pictures of a batch: only FLUX's rows are pictures of their own."""
    return len(batch.conditions) if case.startswith("flux") else 1


# ---- FLUX ----


def flux_batch(bench: Bench, side: int, rows: int) -> DenoiseBatch:
    text, joint, pooled, channels = (5, 12, 10, 4) if bench.tiny else (512, 4096, 768, 16)
    pixels = 8 if bench.tiny else side // 8
    conditions = [
        {
            flux.PROMPT: bench.normal(text, joint),
            flux.POOLED: bench.normal(pooled),
            flux.GUIDANCE: torch.tensor(3.5, device=bench.device),
        }
        for _ in range(rows)
    ]
    times = torch.linspace(950.0, 50.0, rows, device=bench.device)
    return DenoiseBatch(bench.normal(rows, channels, pixels, pixels, dtype=torch.float32), times, conditions)


def flux_peer(model: Any, batch: DenoiseBatch) -> Callable[[], Any]:
    """One picture at a time, as its pipeline calls it."""
    tokens = flux.pack_latents(batch.latents[:1]).to(model.dtype)
    inputs = {
        "hidden_states": tokens,
        "encoder_hidden_states": batch.conditions[0][flux.PROMPT][None],
        "pooled_projections": batch.conditions[0][flux.POOLED][None],
        "timestep": batch.timesteps[:1].to(model.dtype) / 1000,
        "guidance": torch.full((1,), 3.5, device=tokens.device),
        "img_ids": torch.zeros(tokens.shape[1], 3, device=tokens.device),
        "txt_ids": torch.zeros(batch.conditions[0][flux.PROMPT].shape[0], 3, device=tokens.device),
        "return_dict": False,
    }
    return lambda: model(**inputs)


def run_flux(bench: Bench, cases: list[str], autotune: bool) -> None:
    sides = {"flux-1024": (1024, 1), "flux-512": (512, 1), "flux-512x8": (512, 8)}
    wanted = {name: flux_batch(bench, *sides[name]) for name in cases if name in sides}
    if bench.kernels:
        run_kernels(bench, cases, wanted)
    if bench.wants("compiled"):
        run_compiled_flux(bench, wanted, autotune)
    if "engine" in cases and not bench.kernels:
        run_engine(bench, make_flux(bench)[1])
    form = "diffusers" if bench.tiny else "diffusers compiled"
    alone = [name for name in wanted if name != "flux-512x8"]
    if alone and bench.wants(form):
        transformer = make_flux(bench)[0]
        if not bench.tiny:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        for name in alone:
            bench.form(name, form, flux_peer(transformer, wanted[name]))
            bench.parts(name, form, flux_peer(transformer, wanted[name]))


def make_flux(bench: Bench) -> tuple[Any, flux.FluxDenoiser]:
    """A transformer, and as a denoiser. What merges takes its weights."""
    bench.free()
    transformer = bench.build(lambda: FluxTransformer2DModel(**FLUX), tiny_flux)
    return transformer, flux.FluxDenoiser(transformer)


def run_compiled_flux(bench: Bench, wanted: dict[str, DenoiseBatch], autotune: bool) -> None:
    """The merged blocks, fused by the compiler: for one shape, for any, and with its own matrix products."""
    _, model = make_flux(bench)
    blocks = model.merge()
    if not bench.tiny:
        compile_blocks(blocks, dynamic=False)
    for name, batch in wanted.items():
        run_forms(bench, name, "compiled", model, batch)
    if bench.tiny:
        return
    if bench.wants("compiled for any shape"):  # as it is served: shapes come as they come
        torch._dynamo.reset()
        compile_blocks(blocks)
        for name, batch in wanted.items():
            run = lambda batch=batch: model.forward(batch)  # noqa: E731
            bench.form(name, "compiled for any shape", run, share_of(name, batch))
    if autotune:
        torch._dynamo.reset()
        for block in blocks:
            block.compile(fullgraph=True, dynamic=False, mode="max-autotune-no-cudagraphs")
        for name, batch in wanted.items():
            run = lambda batch=batch: model.forward(batch)  # noqa: E731
            bench.form(name, "compiled, autotuned", run, share_of(name, batch))


def run_kernels(bench: Bench, cases: list[str], wanted: dict[str, DenoiseBatch]) -> None:
    """Our kernels and their variants, and the engine with them."""
    from polymux.modalities.diffusion.flux_kernels import KernelSteps

    steps = KernelSteps()
    _, model = make_flux(bench)
    model.merge(steps=steps)
    for name, batch in wanted.items():
        run_forms(bench, name, "kernels", model, batch)
    for variant, setting in {"activation apart": "epilogue", "one stream": "beside"}.items():
        setattr(steps, setting, False)
        for name, batch in wanted.items():
            run = lambda batch=batch: model.forward(batch)  # noqa: E731
            bench.form(name, f"kernels, {variant}", run, share_of(name, batch))
        setattr(steps, setting, True)
    if "engine" in cases:
        run_engine(bench, model)
    del model
    if bench.wants("kernels, halves together"):
        _, model = make_flux(bench)
        model.merge(steps=KernelSteps(split=False))  # the weights lie otherwise
        for name, batch in wanted.items():
            run_forms(bench, name, "kernels, halves together", model, batch)


def run_products(bench: Bench) -> None:
    """The products of FLUX's blocks: rows are tokens of one picture and of eight."""
    dim = 64 if bench.tiny else 3072
    shapes = {
        "query, key, value": (dim, 3 * dim),
        "out": (dim, dim),
        "up": (dim, 4 * dim),
        "down": (4 * dim, dim),
        "single, in": (dim, 7 * dim),
        "single, out": (5 * dim, dim),
    }
    for rows in (64,) if bench.tiny else (512, 1024, 1536, 4096, 4608, 8192, 12288):
        for name, (inputs, outputs) in shapes.items():
            hidden, weight, bias = bench.normal(rows, inputs), bench.normal(outputs, inputs), bench.normal(outputs)
            plain = lambda: torch.nn.functional.linear(hidden, weight, bias)  # noqa: E731, B023
            ms = bench.form(f"product {name}", f"{rows} rows", plain)
            activated = 0.0
            if name == "up":
                run = lambda: torch._addmm_activation(bias, hidden, weight.T, use_gelu=True)  # noqa: E731, B023
                activated = bench.form(f"product {name}", f"{rows} rows, activated", run)
            for form, took in {"": ms, ", activated": activated}.items():
                if took:
                    rate = 2 * rows * inputs * outputs / took / 1e9
                    bench.tell(f"product {name}", f"{rows} rows{form}: rate", tflops=round(rate, 1))


def run_engine(bench: Bench, model: BlockModel) -> None:
    """Milliseconds of one step of one picture through the loop, rows joining one launch apart."""
    steps = 40 if bench.tiny else 200
    every_other = StepMask(mask=(True, False) * (steps // 2), tail=0)
    first_block = FirstBlock(threshold=float("inf"), max_skips=1, tail=0)
    for side, rows in ((1024, 1), (512, 1), (512, 8)):
        whole = None
        for name, rule in (("all steps", None), ("every other skipped", every_other), ("first block", first_block)):
            batch = flux_batch(bench, side, rows)
            shape = tuple(batch.latents.shape[1:])
            schedule = flux.make_schedule(flow_scheduler(), steps, shape)
            requests = {
                str(row): DenoiseRequest(shape, schedule, (batch.conditions[row],), seed=row, rule=rule)
                for row in range(rows)
            }
            site = Site(
                open_device(bench.device.type), SiteSettings(cache_bytes=(1 << 26) if bench.tiny else (2 << 30))
            )
            stage = DenoiseStage("denoise", model, site, max_units=20_000)
            driver = Driver(Loop(site, {"m": DenoiseProgram(stage, requests)}))
            for row in requests:
                driver.submit(row, "m", "denoise", DenoiseWork([row]))
                driver.step()
            took = bench.form(f"engine flux-{side}x{rows}", name, driver.step, rows, whole)
            whole = whole or took
            for row in requests:
                driver.cancel(row)
            driver.finish()


# ---- Wan, SDXL ----


def make_wan(bench: Bench) -> Any:
    bench.free()
    transformer = bench.build(lambda: WanTransformer3DModel(**WAN), lambda: tiny_wan(4))
    if not bench.tiny:  # drawn on meta, its tables are nothing
        transformer.rope = type(transformer.rope)(128, (1, 2, 2), 1024).to(bench.device)
        transformer.rope.float()
    return transformer


def run_wan(bench: Bench) -> None:
    shape, text, dim = ((4, 3, 4, 6), 7, 32) if bench.tiny else ((16, 21, 60, 104), 512, 4096)
    batch = DenoiseBatch(
        bench.normal(1, *shape, dtype=torch.float32),
        torch.full((1,), 900.0, device=bench.device),
        [{encoders.PROMPT: bench.normal(text, dim)}],
    )
    if bench.kernels and bench.wants("kernels"):
        from polymux.modalities.diffusion.flux_kernels import KernelSteps

        model = wan.WanDenoiser([make_wan(bench)])
        model.merge(steps=KernelSteps())
        run_forms(bench, "wan-480p", "kernels", model, batch)
        del model
    if bench.wants("compiled"):
        model = wan.WanDenoiser([make_wan(bench)])
        blocks = model.merge()
        if not bench.tiny:
            compile_blocks(blocks, dynamic=False)
        run_forms(bench, "wan-480p", "compiled", model, batch)
        del model, blocks
    form = "diffusers" if bench.tiny else "diffusers compiled"
    if bench.wants(form):
        transformer = make_wan(bench)
        inputs = {
            "hidden_states": batch.latents.to(bench.dtype),
            "timestep": batch.timesteps,
            "encoder_hidden_states": batch.conditions[0][encoders.PROMPT][None],
            "return_dict": False,
        }
        if not bench.tiny:
            transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
        bench.form("wan-480p", form, lambda: transformer(**inputs))
        bench.parts("wan-480p", form, lambda: transformer(**inputs))


def run_sdxl(bench: Bench) -> None:
    make = lambda: bench.build(lambda: UNet2DConditionModel(**SDXL), lambda: tiny_unet("sdxl"))  # noqa: E731
    side, text, dim, pooled = (16, 7, 32, 16) if bench.tiny else (128, 77, 2048, 1280)
    conditions = [
        {
            encoders.PROMPT: bench.normal(text, dim),
            encoders.POOLED: bench.normal(pooled),
            unet.SIZES: torch.tensor([1024.0, 1024, 0, 0, 1024, 1024], device=bench.device),
        }
        for _ in range(2)
    ]
    batch = DenoiseBatch(
        bench.normal(2, 4, side, side, dtype=torch.float32), torch.full((2,), 500.0, device=bench.device), conditions
    )
    if bench.kernels and bench.wants("kernels", "kernels, graph"):
        from polymux.modalities.diffusion.flux_kernels import KernelSteps

        model = unet.UNetDenoiser(make())
        model.merge(steps=KernelSteps())
        run_forms(bench, "sdxl", "kernels", model, batch)
        if not bench.tiny:  # the library tries its convolutions instead of guessing which is best
            torch.backends.cudnn.benchmark = True
            run_forms(bench, "sdxl", "kernels, convolutions tried", model, batch)
            torch.backends.cudnn.benchmark = False
        del model
        bench.free()
    model = unet.UNetDenoiser(make())
    blocks = model.merge()
    run_forms(bench, "sdxl", "merged", model, batch)
    transformers = [block for block in blocks if isinstance(block, BasicTransformerBlock)]
    if bench.wants("transformer blocks compiled"):
        if not bench.tiny:  # each kind by itself: what compiling it gains, and what it costs at the start
            compile_blocks(transformers, dynamic=False)
        run_forms(bench, "sdxl", "transformer blocks compiled", model, batch)
    if bench.wants("compiled"):
        if not bench.tiny:
            compile_blocks([block for block in blocks if block not in transformers], dynamic=False)
        run_forms(bench, "sdxl", "compiled", model, batch)
    if bench.tiny or not bench.wants("diffusers compiled"):
        return
    del model, blocks, transformers
    bench.free()
    network = make()
    network.to(memory_format=torch.channels_last).compile(fullgraph=True)
    inputs = (batch.latents.to(bench.dtype), batch.timesteps, batch.gather(encoders.PROMPT))
    added = {"text_embeds": batch.gather(encoders.POOLED), "time_ids": batch.gather(unet.SIZES).to(bench.dtype)}
    run = lambda: network(*inputs, added_cond_kwargs=added, return_dict=False)  # noqa: E731
    bench.form("sdxl", "diffusers compiled", run)


# ---- attention ----


def run_attention(bench: Bench) -> None:
    shapes = {"flux-1024": (4608, 24), "flux-512": (1536, 24), "wan-480p": (32760, 12)}
    backends = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION)
    for name, (tokens, heads) in shapes.items():
        count = 64 if bench.tiny else tokens
        # as projections leave them: heads beside each other
        query, key, value = (bench.normal(1, count, heads, 128).transpose(1, 2) for _ in range(3))
        for backend in (None, *backends):

            def run(backend: SDPBackend | None = backend, states: tuple[Tensor, ...] = (query, key, value)) -> None:
                if backend is None:
                    scaled_dot_product_attention(*states)
                    return
                with sdpa_kernel(backend):
                    scaled_dot_product_attention(*states)

            bench.form(f"attention {name}", "torch's choice" if backend is None else backend.name.lower(), run)
        apart = [each.contiguous() for each in (query, key, value)]
        run = lambda: scaled_dot_product_attention(*apart)  # noqa: E731, B023
        bench.form(f"attention {name}", "torch's choice, heads apart", run)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ["flux-1024", "flux-512", "flux-512x8", "engine", "wan-480p", "sdxl", "attention", "products"]
    parser.add_argument("cases", nargs="*", default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true", help="on the CPU, with tiny models: checks the script")
    parser.add_argument("--seconds", type=float, default=2.0, help="of timed passes, a form")
    parser.add_argument("--forms", default="", help="a pattern of those that are measured")
    parser.add_argument("--limit", type=float, default=float("inf"), help="seconds after which no form begins")
    parser.add_argument("--autotune", action="store_true", help="also the compiler's own matrix products: minutes")
    arguments = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64
    bench = Bench(arguments.out, arguments.tiny, arguments.seconds, TARGETS, PEERS, arguments.forms, arguments.limit)
    cases = list(dict.fromkeys(arguments.cases))
    if unknown := set(cases) - set(names):
        parser.error(f"no such case: {', '.join(sorted(unknown))}")
    of_flux = [case for case in cases if case.startswith("flux") or case == "engine"]
    for case in cases:
        if case in of_flux and case != of_flux[0]:
            continue  # they share a model: all in the first one's place
        if case in of_flux:
            run_flux(bench, of_flux, arguments.autotune)
        elif case == "wan-480p":
            run_wan(bench)
        elif case == "sdxl":
            run_sdxl(bench)
        elif case == "attention":
            run_attention(bench)
        else:
            run_products(bench)
        bench.free()


if __name__ == "__main__":
    main()
