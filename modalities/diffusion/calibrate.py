"""`polymux calibrate`: what a checkpoint's presets skip by, measured once, and tried before it is believed.

First every step of some prompts is computed, and what step caches go by is measured: the magnitudes of residuals, for
MagCache, and how residuals move with the modulated input, for TeaCache. Then each rule that a preset could be is tried
on the same prompts and seeds. A preset is the one that skips most among those whose pictures stay close enough to the
exact ones; where none does, or none skips a tenth of the steps, it is off.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from polymux.core.batch.oneshot import OneShotRow
from polymux.core.batch.trajectory import DenoiseRequest, DenoiseRow
from polymux.core.cache.stepcache import DeepCache, FirstBlock, MagCache, StepProbe, StepRule, TeaCache
from polymux.core.engine.job import Job
from polymux.core.engine.loop import Loop
from polymux.core.engine.site import Site
from polymux.core.engine.wire import pack
from polymux.core.errors import InvalidRequest, PolymuxError
from polymux.core.tasks import Film, Paint
from polymux.core.vocabulary import Ended, Failed, Submit
from polymux.modalities.diffusion.front import PaintFront
from polymux.modalities.diffusion.presets import Presets
from polymux.modalities.diffusion.program import Adapter, PaintProgram, load_painter
from polymux.modalities.diffusion.unet import UNetDenoiser
from polymux.modalities.diffusion.work import PaintWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

PROMPTS = (
    "a red bicycle leaning on a white wall, morning light",
    "portrait of an old fisherman with a grey beard",
    "a city at night in the rain, neon signs, reflections",
    "a bowl of ramen on a wooden table, seen from above",
)

CLOSE = {"balanced": 30.0, "fast": 24.0}
"""PSNR, in decibels against the exact pictures, that a preset must keep on average."""

LEAST = 0.1
"""Share of the steps that a preset must skip to be worth its difference."""

DEGREE = 4
"""Of TeaCache's polynomial, as its authors fit it."""


@dataclass(frozen=True)
class Trial:
    """One rule on all prompts."""

    rule: StepRule
    skipped: float
    """Share of the steps."""
    psnr: float
    """Against the exact pictures, in decibels, on average."""


@dataclass(frozen=True)
class Calibration:
    """Of one checkpoint."""

    steps: int
    ratios: tuple[float, ...]
    """Per step, for MagCache; empty of a UNet."""
    polynomial: tuple[float, ...]
    """For TeaCache; empty of a UNet."""
    trials: tuple[Trial, ...]

    def choose(self, preset: str) -> Trial | None:
        """The rule that skips most of those that stay close enough."""
        able = [trial for trial in self.trials if trial.psnr >= CLOSE[preset] and trial.skipped >= LEAST]
        return max(able, key=lambda trial: (trial.skipped, trial.psnr), default=None)


class TryingProgram(PaintProgram):
    """Keeps the pictures by seed, and what probes measured."""

    pictures: dict[int, np.ndarray]
    measured: list[torch.Tensor]

    async def _paint(
        self, job: Job, request: DenoiseRequest, index: int, work: PaintWork, adapter: Adapter | None
    ) -> None:
        row = await job.start(self.denoiser, DenoiseRow(job, request, index))
        self.measured += row.measured
        if row.result is not None:  # a model that gives nothing that can be shown is not to be calibrated
            decoded = await job.start(self.decoder, OneShotRow(job, row.result, 1, index))
            self.pictures[request.seed] = decoded.result.numpy().astype(np.float32)


def calibrate(
    files: ModelFiles, site: Site, options: dict[str, Any], prompts: Sequence[str], **asked: int | None
) -> Calibration:
    """Measured over all prompts and branches. `asked`: steps, width, height (the model's own if None).

    Raises `InvalidRequest` without prompts, and whatever a request may raise.
    """
    if not prompts:
        raise InvalidRequest("there are no prompts to calibrate with", param="prompts")
    front = PaintFront.load(files, options)
    kind, task = (Film, "video") if front.recipe.frames else (Paint, "image")
    loaded = load_painter(files, site, options)
    program = TryingProgram(task, loaded.family, Presets({}), site)
    loop = Loop(site, {"model": program})
    works = [front.prepare(task, kind(prompt=prompt, seed=seed, **asked)).work for seed, prompt in enumerate(prompts)]

    def run(rule: StepRule | None) -> tuple[float, dict[int, np.ndarray]]:
        program.presets, program.pictures, program.measured = Presets({}, rule), {}, []
        for seed, work in enumerate(works):
            if work is not None:
                loop.handle(Submit(f"prompt {seed}", "model", task, pack(work)))
        skipped, taken = 0, 0
        while loop.step():
            for report in loop.take_reports():
                if isinstance(report, Failed):
                    raise PolymuxError.from_wire(report.error)
                if isinstance(report, Ended):
                    skipped += report.receipt.steps_skipped
                    taken += report.receipt.steps_skipped + report.receipt.steps_run
        return skipped / max(taken, 1), program.pictures

    deep = isinstance(loaded.family.denoiser, UNetDenoiser)
    exact = run(None if deep else StepProbe())[1]
    ratios, polynomial = ((), ()) if deep else read_probes(program.measured)
    trials = []
    for rule in list_rules(ratios, polynomial):
        skipped, pictures = run(rule)
        psnr = [measure_psnr(pictures[seed], picture) for seed, picture in exact.items()]
        trials.append(Trial(rule, skipped, sum(psnr) / len(psnr)))
    steps = next(work.steps for work in works if isinstance(work, PaintWork))
    return Calibration(steps, ratios, polynomial, tuple(trials))


def read_probes(measured: Sequence[torch.Tensor]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean ratios by step, and the polynomial from a modulated input's change to its residual's. `measured`:
    (steps, 3) of every branch, as `Saved.measured`."""
    every = torch.stack(list(measured)).double().cpu().numpy()
    ratios = tuple(round(float(ratio), 5) for ratio in every[:, :, 0].mean(0))
    moved, changed = every[:, 1:, 1].ravel(), every[:, 1:, 2].ravel()
    degree = min(DEGREE, len(np.unique(moved)) - 1)
    if degree < 1:
        return ratios, (1.0, 0.0)
    return ratios, tuple(float(each) for each in np.polyfit(moved, changed, degree))


def list_rules(ratios: tuple[float, ...], polynomial: tuple[float, ...]) -> Iterator[StepRule]:
    """What a preset could be; those of a UNet without ratios."""
    if not ratios:
        yield from (DeepCache(interval=interval) for interval in (2, 3, 5))
        return
    for threshold, skips in ((0.03, 1), (0.06, 2), (0.12, 3), (0.12, 4), (0.24, 5)):
        yield MagCache(ratios=ratios, threshold=threshold, max_skips=skips)
    for threshold in (0.1, 0.2, 0.4):
        yield TeaCache(threshold=threshold, polynomial=polynomial, warmup=2, max_skips=4)
    for threshold in (0.08, 0.15):
        yield FirstBlock(threshold=threshold, warmup=3, max_skips=4)


def measure_psnr(picture: np.ndarray, exact: np.ndarray) -> float:
    """In decibels, of pictures from 0 to 255; equal ones count as 100."""
    error = float(np.mean((picture - exact) ** 2))
    return 100.0 if error == 0 else min(100.0, 10 * math.log10(255**2 / error))


def write_calibration(path: Path, calibration: Calibration, prompts: int) -> None:
    """In the form that `presets` reads."""
    chosen = {name: calibration.choose(name) for name in CLOSE}
    told = {
        "steps": calibration.steps,
        "prompts": prompts,
        "ratios": calibration.ratios,
        "polynomial": calibration.polynomial,
        "presets": {name: None if trial is None else name_rule(trial.rule) for name, trial in chosen.items()},
        "trials": [
            {**name_rule(trial.rule), "skipped": round(trial.skipped, 3), "psnr": round(trial.psnr, 2)}
            for trial in calibration.trials
        ],
    }
    path.write_text(json.dumps(told) + "\n")


def name_rule(rule: StepRule) -> dict[str, Any]:
    """A rule's kind and settings, without what the calibration holds once for all."""
    settings = {key: value for key, value in asdict(rule).items() if key not in ("ratios", "polynomial")}
    return {"rule": type(rule).__name__, **settings}
