"""What the step caches' presets cost on `starter/paint` and `starter/film`: one table, and figures for the ledger.

python presets.py --paint FOLDER --film FOLDER --count 100 [--out presets.jsonl]

Every prompt is made by each preset with the same seed, through polymux: how far the pixels are from those of `exact`,
how often the judge finds what was asked for, which share of the steps was skipped, and how long one takes alone.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import judge_film
import judge_paint
import numpy as np
import torch
from judging import Asked, Make, make_all
from polymux_starter import DEFAULTS
from served import Reached, is_small, reach
from torch.nn.functional import avg_pool2d

PRESETS = ("exact", "balanced", "fast")
ALONE = 5
"""Made one by one, to see how long one takes."""
WINDOW = 8
"""Pixels along the side of a window of SSIM."""


@dataclass(frozen=True)
class Row:
    """What a preset makes of one starter. `likeness` to exact: PSNR in dB (None: the same pixels), and SSIM."""

    model: str
    preset: str
    psnr: float | None
    ssim: float
    right: float
    skipped: float
    """Share of the steps."""
    seconds: float


def measure_psnr(one: np.ndarray, other: np.ndarray) -> float | None:
    """Decibels between uint8 arrays of one shape; None where they are equal."""
    error = np.square(one.astype(np.float64) - other).mean()
    return None if error == 0 else float(10 * np.log10(255**2 / error))


def measure_ssim(one: np.ndarray, other: np.ndarray) -> float:
    """The mean over even windows and channels of (..., side, side, 3) uint8, with the usual constants."""
    first, second = (
        torch.tensor(each).double().reshape(-1, *each.shape[-3:]).movedim(-1, 1) / 255 for each in (one, other)
    )

    def pool(values: torch.Tensor) -> torch.Tensor:
        return avg_pool2d(values, WINDOW, 1)

    mean, there = pool(first), pool(second)
    spread, spread_there = pool(first**2) - mean**2, pool(second**2) - there**2
    common = pool(first * second) - mean * there
    low, high = 0.01**2, 0.03**2
    alike = (2 * mean * there + low) * (2 * common + high)
    return float((alike / ((mean**2 + there**2 + low) * (spread + spread_there + high))).mean())


async def compare(
    model: Reached,
    name: str,
    asked: Asked,
    make: Make,
    mark: Callable[..., dict[str, Any]],
) -> list[Row]:
    """One row for each preset."""
    rows, exact = [], []
    for preset in PRESETS:
        await make_all(make, model, asked[:1], quality=preset)
        begun = time.monotonic()
        for one in asked[:ALONE]:
            await make_all(make, model, [one], quality=preset)
        seconds = (time.monotonic() - begun) / len(asked[:ALONE])
        made = await make_all(make, model, asked, quality=preset)
        exact = exact or made
        psnr = [each for each in map(measure_psnr, exact, made) if each is not None]
        ssim = statistics.mean(map(measure_ssim, exact, made))
        skipped = await count_skipped(model, asked[0][1], preset)
        right = mark(asked, made)["all"]
        rows.append(Row(name, preset, statistics.mean(psnr) if psnr else None, ssim, right, skipped, seconds))
    return rows


async def count_skipped(model: Reached, prompt: str, preset: str) -> float:
    """The share of steps that the receipt of a picture says were skipped; films carry no receipt: NaN."""
    if model.model != judge_paint.MODEL:
        return float("nan")
    answer = await model.post("images/generations", {"prompt": prompt, "seed": 0, "quality": preset})
    run, skipped = answer["receipt"]["steps_run"], answer["receipt"]["steps_skipped"]
    return float(skipped / (run + skipped))


async def compare_all(paint: str | None, film: str | None, count: int) -> list[Row]:
    rows: list[Row] = []
    if paint is not None:
        asked = judge_paint.choose_prompts(count, 11, small=is_small(paint))
        async with reach(paint, judge_paint.MODEL, DEFAULTS["paint"]) as model:
            rows += await compare(model, "paint", asked, judge_paint.paint, judge_paint.mark)
    if film is not None:
        asked = judge_film.choose_films(count, 11, small=is_small(film))
        async with reach(film, judge_film.MODEL, DEFAULTS["film"]) as model:
            rows += await compare(model, "film", asked, judge_film.film, judge_film.mark)
    return rows


def render(rows: list[Row]) -> str:
    """The table, in Markdown."""
    lines = ["| starter | preset | PSNR, dB | SSIM | right | steps skipped | seconds | speed |"]
    lines.append("|---|---|--:|--:|--:|--:|--:|--:|")
    base = {row.model: row.seconds for row in rows if row.preset == "exact"}
    for row in rows:
        psnr = "same" if row.psnr is None else f"{row.psnr:.1f}"
        skipped = "" if np.isnan(row.skipped) else f"{row.skipped:.0%}"
        cells = (row.model, row.preset, psnr, f"{row.ssim:.3f}", f"{row.right:.1%}", skipped)
        lines.append(f"| {' | '.join(cells)} | {row.seconds:.2f} | {base[row.model] / row.seconds:.2f}x |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--paint", help="a folder, or the address of a server")
    parser.add_argument("--film", help="a folder, or the address of a server")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--out", type=Path, help="a file for the rows, one JSON object a line")
    told = parser.parse_args()
    found = asyncio.run(compare_all(told.paint, told.film, told.count))
    if told.out is not None:
        told.out.write_text("".join(f"{json.dumps(vars(row))}\n" for row in found))
    print(render(found))
