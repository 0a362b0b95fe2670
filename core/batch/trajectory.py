"""A denoise row: one latent on its way from noise to a picture, with a scheduler and a random state of its own.

A request with classifier-free guidance has two branches (two sets of conditions): each is a row of the forward pass,
and the row's update is made from both predictions.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable, Mapping
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
class Origin:
    """The picture that a request starts from, as its latent's distribution, (*shape) each, on the device."""

    mean: Tensor
    deviation: Tensor
    mask: Tensor | None = None
    """(1, height, width): 1 where the picture is painted anew. Elsewhere the origin is put back after every step."""


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
    start: int = 0
    """Steps of the schedule that are left out, because `origin` stands for what they would have made."""
    origin: Origin | None = None
    """Start from this, noised to the first timestep, in place of fresh noise."""
    previews: tuple[int, ...] = ()
    """After these many steps the caller is shown what is becoming of it."""
    strict: bool = False
    """Never share a pass, so that every bit of the latent is the same in any company."""
    adapter: Tensor | None = None
    """(size,), the block of the adapter that changes the model for this request; who holds it keeps it there."""
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
        self.steps = len(request.scheduler.timesteps) - request.start
        if self.steps <= 0 or not request.conditions:
            raise InvalidRequest("an image needs at least one denoising step and one prompt", param="steps")
        rule = request.rule
        known = rule.plan(self.steps) if rule is not None else None
        self.full_steps = self.steps if known is None else sum(known)
        """Steps that are computed, as far as is known beforehand."""
        self.size = 1
        self.group: Hashable = None
        """What its latest grant must agree in with the rows beside it."""
        self.trajectory: Trajectory | None = None
        self.saved: list[Saved] = []
        """Per branch, while the row runs; empty without a rule."""
        self.measured: list[Tensor] = []
        """Per branch, what `StepProbe` measured, (steps, 3) float32 as `Saved.measured`, once the row has ended."""
        self.sketches: dict[int, Tensor] = {}
        """By step, previews on their way to the host."""
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
            scheduler.set_begin_index(request.start)  # else it would search its tables for the first timestep
        self.scheduler = scheduler
        self.generator = torch.Generator().manual_seed(request.seed)
        self._times = scheduler.timesteps[request.start :]
        self._offset = request.start
        self._kept: tuple[Tensor, Tensor, Tensor] | None = None
        """What shows through a mask: mask, origin and noise, (1, *shape) each."""
        self.latents = self._begin(request, device)
        """(1, *shape) float32."""
        self.clock = self._times.to(device, torch.float32)
        """(steps,) float32 on the device."""
        self.taken = 0
        self._options: dict[str, Any] = {"return_dict": False}
        if "generator" in inspect.signature(scheduler.step).parameters:
            self._options["generator"] = self.generator

    def _begin(self, request: DenoiseRequest, device: torch.device) -> Tensor:
        """Drawn in diffusers' order: first the origin's latent, then the noise."""
        origin = request.origin
        if origin is None:
            noise = draw_noise(request.shape, self.generator).to(device)[None]
            return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)
        drawn = draw_noise(request.shape, self.generator).to(device)
        clean = (origin.mean.float() + origin.deviation.float() * drawn)[None]
        noise = draw_noise(request.shape, self.generator).to(device)[None]
        if origin.mask is not None:
            self._kept = (origin.mask.float().expand(1, *request.shape), clean, noise)
            if request.start == 0:
                return noise * getattr(self.scheduler, "init_noise_sigma", 1.0)
        return self._noised(clean, noise, 0)

    def _noised(self, clean: Tensor, noise: Tensor, step: int) -> Tensor:
        time = self._times[step : step + 1].to(clean.device)
        if hasattr(self.scheduler, "scale_noise"):
            scaled: Tensor = self.scheduler.scale_noise(clean, time, noise)
            return scaled
        added: Tensor = self.scheduler.add_noise(clean, noise, time)
        return added

    @property
    def model_input(self) -> Tensor:
        """The latent as the model takes it at the next step: (1, *shape) float32."""
        if not hasattr(self.scheduler, "scale_model_input"):
            return self.latents
        scaled: Tensor = self.scheduler.scale_model_input(self.latents, self._times[self.taken])
        return scaled

    def estimate(self, prediction: Tensor) -> Tensor:
        """The latent at the end if this prediction, (1, *shape) float32, held all the way."""
        config, latents = self.scheduler.config, self.latents
        kind = config.get("prediction_type", "flow_prediction")
        sigma = self.scheduler.sigmas[self._offset + self.taken].item() if hasattr(self.scheduler, "sigmas") else 0.0
        if kind == "flow_prediction" or hasattr(self.scheduler, "scale_noise"):
            return latents - sigma * prediction
        if kind == "sample":
            return prediction
        if hasattr(self.scheduler, "is_scale_input_called"):  # latents of Euler's kind grow with sigma
            kept, noised = 1.0, sigma
        else:
            share = self.scheduler.alphas_cumprod[self._times[self.taken].long().cpu()].item()
            kept, noised = share**0.5, (1 - share) ** 0.5
        if kind == "v_prediction":
            norm = kept**2 + noised**2
            return (kept * latents - noised * norm**0.5 * prediction) / norm
        return (latents - noised * prediction) / kept

    def advance(self, prediction: Tensor) -> None:
        """Take one step with the model's prediction, (1, *shape) float32. On an error nothing has changed."""
        before = {name: value[:] if isinstance(value, list) else value for name, value in vars(self.scheduler).items()}
        drawn = self.generator.get_state()
        try:
            timestep = self._times[self.taken]
            latents: Tensor = self.scheduler.step(prediction, timestep, self.latents, **self._options)[0]
        except BaseException:
            vars(self.scheduler).update(before)
            self.generator.set_state(drawn)
            raise
        self.latents = latents
        self.taken += 1
        if self._kept is not None:
            mask, clean, noise = self._kept
            ended = self.taken == len(self._times)
            shown = clean if ended else self._noised(clean, noise, self.taken)
            self.latents = (1 - mask) * shown + mask * latents


def draw_noise(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Standard normal noise, (*shape) float32, drawn on the CPU: the same on every device and in every batch."""
    if generator.device.type != "cpu":
        raise InternalError("noise is drawn on the CPU, so that it does not depend on the device")
    return torch.randn(shape, generator=generator, dtype=torch.float32)
