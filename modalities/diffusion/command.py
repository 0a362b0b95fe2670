"""`polymux calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def calibrate(
    ctx: typer.Context,
    model: Annotated[str, typer.Argument(help="A name or a reference.")],
    steps: Annotated[int | None, typer.Option(help="Denoising steps. Default: the model's.")] = None,
    width: Annotated[int | None, typer.Option(help="Default: the model's.")] = None,
    height: Annotated[int | None, typer.Option(help="Default: the model's.")] = None,
    prompts: Annotated[Path | None, typer.Option(help="A file with a prompt a line. Default: four of our own.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the weights.")] = "float32",
    out: Annotated[Path | None, typer.Option(help="Default: step_cache.json in the model's folder.")] = None,
) -> None:
    """Measure what the presets balanced and fast of a denoising model skip by."""
    from polymux.core.cli.output import tell
    from polymux.core.compute.device import open_device
    from polymux.core.engine.site import Site
    from polymux.core.models.resolve import resolve
    from polymux.modalities.diffusion import calibrate as work
    from polymux.modalities.diffusion.presets import CALIBRATION

    plugins = ctx.obj.plugins
    named = next((each for each in plugins.named_models() if model in (each.name, *each.aliases)), None)
    files = resolve(model if named is None else named.reference, sources=plugins.model_sources(), report=tell)
    texts = work.PROMPTS if prompts is None else [line for line in prompts.read_text().splitlines() if line.strip()]
    options = {**({} if named is None else named.options), "dtype": dtype, "compile": False}
    site = Site(open_device(device))
    ratios = work.calibrate(files, site, options, texts, steps=steps, width=width, height=height)
    path = files.folder / CALIBRATION if out is None else out
    work.write_calibration(path, ratios, len(texts))
    tell(f"{len(ratios)} ratios from {len(texts)} prompts: {path}")
