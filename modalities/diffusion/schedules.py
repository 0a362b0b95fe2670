"""Schedulers: one object per picture, made from the model's own, with its timesteps set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polymux.core.errors import ModelError

KNOWN = (
    "FlowMatchEulerDiscreteScheduler",
    "DDIMScheduler",
    "EulerDiscreteScheduler",
    "EulerAncestralDiscreteScheduler",
    "DPMSolverMultistepScheduler",
    "UniPCMultistepScheduler",
    "PNDMScheduler",
)
"""Those whose state is theirs alone, and whose step never waits for the device."""


def check_scheduler(scheduler: Any) -> None:
    """Raises `ModelError` for a kind that is not known to run by steps."""
    name = type(scheduler).__name__
    if name not in KNOWN:
        raise ModelError(f"the model's scheduler is a {name}; served are {', '.join(KNOWN)}")


def make_schedule(template: Any, steps: int, tokens: int, *, linear: bool = False) -> Any:
    """A scheduler of the template's kind with the timesteps of `steps` steps.

    `tokens` of the picture shift the schedule where the configuration says so. `linear`: the sigmas fall evenly, as
    FLUX and Qwen-Image want them whatever the scheduler would do.
    """
    scheduler = type(template).from_config(template.config)
    config = scheduler.config
    options: dict[str, Any] = {"mu": shift_for(tokens, config)} if config.get("use_dynamic_shifting") else {}
    if linear and not config.get("use_flow_sigmas"):
        scheduler.set_timesteps(sigmas=np.linspace(1.0, 1 / steps, steps), **options)
    else:
        scheduler.set_timesteps(steps, **options)
    return scheduler


def skip_steps(steps: int, strength: float) -> int:
    """Steps that a picture starting from another leaves out: never all of them."""
    return int(steps - min(steps * strength, steps))


def shift_for(tokens: int, config: Mapping[str, Any]) -> float:
    """The shift's exponent, linear in the number of picture tokens, as the scheduler's configuration says."""
    low, high = config.get("base_image_seq_len", 256), config.get("max_image_seq_len", 4096)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (high - low)
    return slope * tokens + config.get("base_shift", 0.5) - slope * low
