"""`polymux calibrate`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

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
    """Find out which steps the presets balanced and fast of a denoising model may skip."""
    from polymux.core.cli.output import print_table, tell
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
    found = work.calibrate(files, site, options, texts, steps=steps, width=width, height=height)
    path = files.folder / CALIBRATION if out is None else out
    work.write_calibration(path, found, len(texts))
    print_table(
        ("rule", "skipped", "PSNR"),
        [(describe(trial.rule), f"{trial.skipped:.0%}", f"{trial.psnr:.1f} dB") for trial in found.trials],
    )
    for preset in work.CLOSE:
        chosen = found.choose(preset)
        tell(f"{preset}: " + ("off, nothing stays close enough" if chosen is None else describe(chosen.rule)))
    tell(f"from {len(texts)} prompts: {path}")


def describe(rule: Any) -> str:
    """A rule's kind, and what tells it from others of its kind."""
    shown = {name: getattr(rule, name, None) for name in ("threshold", "interval", "max_skips")}
    return " ".join([type(rule).__name__, *(f"{name}={value}" for name, value in shown.items() if value is not None)])
