"""A denoise row: one latent on its way from noise to a picture, with a scheduler and a random state of its own.

A request with classifier-free guidance has two branches (two sets of conditions): each is a row of the forward pass,
and the row's update is made from both predictions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from polymux.core.batch.row import Row
from polymux.core.errors import InternalError, InvalidRequest

if TYPE_CHECKING:
    from polymux.core.cache.saved import Saved
    from polymux.core.cache.stepcache import StepRule
    from polymux.core.engine.job import Job


class NoiseScheduler(Protocol):
    """What is used of a scheduler in diffusers' style. Its tables stay on the host, so that it never waits."""

    timesteps: Tensor

    def step(self, model_output: Tensor, timestep: Tensor, sample: Tensor, **options: Any) -> Any: ...


@dataclass(frozen=True, eq=False)
class DenoiseRequest:
    """What to denoise. Equal requests give equal latents, whatever else runs."""

    shape: tuple[int, ...]
    """Of the latent, without a batch dimension: (channels, height, width), or (channels, frames, height, width)."""
    scheduler: NoiseScheduler
    """A template with its timesteps set, on the CPU. Every row works on a copy."""
    conditions: tuple[Mapping[str, Tensor], ...]
    """Per branch (the conditional one first), what the model reads besides latent and timestep, on the device,
    without a batch dimension."""
    scale: float = 1.0
    """Of classifier-free guidance, with two branches."""
    seed: int = 0
    """Of the initial noise and of a stochastic scheduler's. Picture k of n has seed + k."""
    rule: StepRule | None = None
    """Which steps reuse what an earlier one saved; None: every step is computed."""
    latents: Tensor | None = None
    """Start from these (noised to the first timestep) in place of fresh noise."""
    publish: bool = True
    """Report every step to the caller; otherwise only the program sees the row."""


class DenoiseRow(Row):
    """`result` is the final latent, (*shape) float32 on the device, once the row has ended.

    `size` units make one step: the units of one branch, as the model counts them, times the branches.
    """

    def __init__(self, job: Job, request: DenoiseRequest, branch: int = 0) -> None:
        """Raises `InvalidRequest` for a schedule without steps or a request without branches."""
        super().__init__(job, branch)
        self.request = request
        self.steps = len(request.scheduler.timesteps)
        if not self.steps or not request.conditions:
            raise InvalidRequest("an image needs at least one denoising step and one prompt", param="steps")
        self.size = 1
        self.trajectory: Trajectory | None = None
        self.saved: list[Saved] = []
        """Per branch, while the row runs; empty without a rule."""
        self.ratios: list[Tensor] = []
        """Per branch, the magnitude ratios that `MagProbe` measured, (steps,) float32, once the row has ended."""
        self.result: Tensor | None = None

    @property
    def next_step(self) -> int:
        """The step that the next launch runs."""
        return self.scheduled // self.size


class Trajectory:
    """What a running row holds: latent, scheduler, random state. `taken` steps are enqueued on the device."""

    def __init__(self, request: DenoiseRequest, device: torch.device) -> None:
        scheduler: Any = copy.deepcopy(request.scheduler)
        if hasattr(scheduler, "set_begin_index") and scheduler.begin_index is None:
            scheduler.set_begin_index(0)  # else it would search its tables for the first timestep
        self.scheduler = scheduler
        self.generator = torch.Generator().manual_seed(request.seed)
        latents = request.latents
        if latents is None:
            latents = draw_noise(request.shape, self.generator) * getattr(scheduler, "init_noise_sigma", 1.0)
        self.latents = latents.to(device, torch.float32).reshape(1, *request.shape)
        """(1, *shape) float32."""
        self.clock = scheduler.timesteps.to(device, torch.float32)
        """(steps,) float32 on the device."""
        self.taken = 0
        self._options: dict[str, Any] = {"return_dict": False}
        if "generator" in inspect.signature(scheduler.step).parameters:
            self._options["generator"] = self.generator

    @property
    def model_input(self) -> Tensor:
        """The latent as the model takes it at the next step: (1, *shape) float32."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return self.latents
        scaled: Tensor = self.scheduler.scale_model_input(self.latents, self.scheduler.timesteps[self.taken])
        return scaled

    def advance(self, prediction: Tensor) -> None:
        """Take one step with the model's prediction, (1, *shape) float32. On an error nothing has changed."""
        before = {name: value[:] if isinstance(value, list) else value for name, value in vars(self.scheduler).items()}
        drawn = self.generator.get_state()
        try:
            timestep = self.scheduler.timesteps[self.taken]
            latents: Tensor = self.scheduler.step(prediction, timestep, self.latents, **self._options)[0]
        except BaseException:
            vars(self.scheduler).update(before)
            self.generator.set_state(drawn)
            raise
        self.latents = latents
        self.taken += 1


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal noise, (*shape) float32, drawn on the CPU: the same on every device and in every batch."""
    if generator.device.type != "cpu":
        raise InternalError("noise is drawn on the CPU, so that it does not depend on the device")
    return torch.randn(shape, generator=generator, dtype=torch.float32)
