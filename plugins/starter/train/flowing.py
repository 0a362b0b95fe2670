"""Flow matching: a transformer and its text encoders learn the velocity from pictures to noise, and are sampled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import torch
from pace import Pace
from recording import Recorded, set_rate
from torch import Generator, Tensor, nn
from torch.nn.functional import mse_loss

RATE = 3e-3
DROPPED = 0.1
"""Of the texts: what classifier-free guidance leans on."""
MEMORY = 0.999
"""Of the averaged weights, at the end of a run."""
LOOK_EVERY = 120.0
"""Seconds."""

Predict = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(noisy latents, times from 0 to 1, ids (batch, length)) to velocities."""


@dataclass
class Gallery:
    """What is learned from: latents in the standard scale, which scene each is of, and how scenes are told."""

    latents: Tensor
    """(pictures, channels, ...)."""
    scenes: Tensor
    """(pictures,) int64."""
    ids: Tensor
    """(scenes, wordings, length) int64."""
    nothing: Tensor
    """(length,) int64: the empty text."""


class Average:
    """Weights averaged over the run's last steps."""

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._live = [parameter for module in modules for parameter in module.parameters()]
        self._kept = [parameter.detach().clone() for parameter in self._live]

    @torch.no_grad()
    def follow(self, step: int) -> None:
        torch._foreach_lerp_(self._kept, self._live, 1 - min(MEMORY, (1 + step) / (10 + step)))

    def wear(self) -> None:
        """The modules have the averaged weights from now on."""
        self._put(self._kept)

    @contextmanager
    def worn(self) -> Iterator[None]:
        """The modules have the averaged weights meanwhile."""
        live = [parameter.detach().clone() for parameter in self._live]
        self.wear()
        try:
            yield
        finally:
            self._put(live)

    @torch.no_grad()
    def _put(self, weights: list[Tensor]) -> None:
        for parameter, weight in zip(self._live, weights, strict=True):
            parameter.copy_(weight)


def train_flow(
    predict: Predict,
    modules: Sequence[nn.Module],
    gallery: Gallery,
    generator: Generator,
    *,
    batch: int,
    pace: Pace,
    shift: float,
    look: Callable[[float], None],
    recorded: bool = True,
) -> None:
    """Leaves the averaged weights in the `modules`. `look` is called every other minute, and at the end, with the loss
    while the modules have those weights.

    `generator` lives on the gallery's device. `shift` moves the times that are learned towards noise. `recorded`: on a
    GPU the steps are recorded as a graph.
    """
    device = gallery.latents.device
    matrices = [p for module in modules for p in module.parameters() if p.dim() > 1]
    others = [p for module in modules for p in module.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": others, "weight_decay": 0.0}]
    recorded = recorded and device.type == "cuda"
    rate = torch.tensor(RATE, device=device) if recorded else RATE  # a number would be recorded as it is now
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.98), fused=fused, capturable=recorded)
    average = Average(modules)

    def learn(clean: Tensor, noise: Tensor, times: Tensor, ids: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            velocity = predict(mix(clean, noise, times), times, ids)
        loss = mse_loss(velocity.float(), noise - clean)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_([*matrices, *others], 1.0)
        optimizer.step()
        return loss.detach()

    take = Recorded(learn) if recorded else learn
    running = torch.zeros((), device=device)
    looked = 0.0
    for module in modules:
        module.train().requires_grad_(True)
    while True:
        set_rate(optimizer, RATE * pace.rate)
        clean, ids = pick(gallery, batch, generator)
        noise = torch.randn(clean.shape, generator=generator, device=device)
        loss = take(clean, noise, draw_times(batch, shift, generator), ids)
        average.follow(pace.step)
        running.lerp_(loss, 0.02 if pace.step else 1.0)
        going = pace.advance()
        pace.tell(loss=lambda: float(running))
        if pace.seconds - looked > LOOK_EVERY and going:
            with average.worn():
                look(float(running))
            looked = pace.seconds
        if not going:
            break
    average.wear()
    for module in modules:
        module.eval().requires_grad_(False)
    look(float(running))


def pick(gallery: Gallery, batch: int, generator: Generator) -> tuple[Tensor, Tensor]:
    """Latents in float32 and one wording of each, or nothing."""
    device = gallery.latents.device

    def draw(below: int) -> Tensor:
        return torch.randint(below, (batch,), generator=generator, device=device)

    rows = draw(len(gallery.latents))
    ids = gallery.ids[gallery.scenes[rows], draw(gallery.ids.shape[1])]
    dropped = torch.rand(batch, generator=generator, device=device) < DROPPED
    return gallery.latents[rows].float(), torch.where(dropped[:, None], gallery.nothing, ids)


def draw_times(batch: int, shift: float, generator: Generator) -> Tensor:
    """(batch,) from 0 to 1: logit-normal, moved towards noise."""
    times = torch.randn(batch, generator=generator, device=generator.device).sigmoid()
    return shift * times / (1 + (shift - 1) * times)


def mix(clean: Tensor, noise: Tensor, times: Tensor) -> Tensor:
    return torch.lerp(clean, noise, times.view(-1, *[1] * (clean.dim() - 1)))


@torch.no_grad()
def sample(
    predict: Predict, noise: Tensor, ids: Tensor, nothing: Tensor, *, steps: int, scale: float, shift: float
) -> Tensor:
    """Euler steps with guidance from `noise` to latents, as the served scheduler takes them."""
    times = torch.linspace(1, 0, steps + 1, device=noise.device)
    times = shift * times / (1 + (shift - 1) * times)
    latents, device = noise, noise.device
    both = torch.cat([ids, nothing.expand_as(ids)])
    for now, then in pairwise(times):
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            told, untold = predict(torch.cat([latents] * 2), now.expand(len(both)), both).float().chunk(2)
        latents = latents + (then - now) * (untold + scale * (told - untold))
    return latents
