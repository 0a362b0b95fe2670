"""The loop that all recipes share: a schedule by steps, a limit by time, and a state from which a run goes on.

Every step draws from a generator seeded by the run's seed and the step's number, so a run that was interrupted goes on
as if it had not been.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor, nn

WARM_UP = 0.03
"""The part of the steps in which the learning rate rises."""
NORM = 1.0
TOLD_EVERY = 50


@dataclass
class Wanted:
    """One run."""

    out: Path
    steps: int
    batch: int
    rate: float
    seed: int
    seconds: float
    device: torch.device
    resume: Path | None = None
    eye: Path | None = None
    small: bool = False


def read_arguments(description: str | None, *, steps: int, batch: int, rate: float, small: tuple[int, int]) -> Wanted:
    """The recipe's arguments, from the command line. `small`: steps and batch that a processor takes in minutes."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--out", type=Path, required=True, help="the folder for the model, the log and the state")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--rate", type=float, default=rate)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after so long; the state is kept")
    parser.add_argument("--resume", type=Path, help="the --out of a run that was stopped")
    parser.add_argument("--eye", type=Path, help="an encoder that has learnt to see, from eye.py")
    parser.add_argument("--small", action="store_true", help="what a processor learns in minutes, to try the recipe")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    told = vars(parser.parse_args())
    usual = small if told["small"] else (steps, batch)
    told |= {name: value for name, value in zip(("steps", "batch"), usual, strict=True) if told[name] is None}
    wanted = Wanted(**{**told, "device": torch.device(told["device"])})
    wanted.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(wanted.seed)
    return wanted


Lose = Callable[[Generator], tuple[Tensor, dict[str, Tensor]]]
"""One batch: its loss, and what the log shows beside it."""


def train(model: nn.Module, lose: Lose, wanted: Wanted) -> bool:
    """Whether all steps were taken within the time. Writes `log.jsonl`."""
    log = wanted.out / "log.jsonl"
    before = begin_log(log, wanted.resume)
    begun = time.monotonic()
    names, parameters = zip(
        *((name, each) for name, each in model.named_parameters() if each.requires_grad), strict=True
    )
    groups = [
        {"params": [each for each in parameters if each.dim() > 1], "weight_decay": 0.05},
        {"params": [each for each in parameters if each.dim() <= 1], "weight_decay": 0.0},
    ]
    fast = wanted.device.type == "cuda"
    optimizer = torch.optim.AdamW(groups, lr=wanted.rate, betas=(0.9, 0.98), fused=True)
    generator = Generator(wanted.device)
    first = load_state(model, optimizer, names, parameters, wanted.resume) if wanted.resume else 0
    model.train()
    for step in range(first, wanted.steps):
        if time.monotonic() - begun > wanted.seconds:
            save_state(model, optimizer, names, parameters, step, wanted.out)
            return False
        generator.manual_seed(wanted.seed * 1_000_003 + step)
        for group in optimizer.param_groups:
            group["lr"] = wanted.rate * schedule(step / wanted.steps)
        with torch.autocast(wanted.device.type, torch.bfloat16, enabled=fast):
            loss, notes = lose(generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, NORM)
        optimizer.step()
        if step % TOLD_EVERY == 0 or step == wanted.steps - 1:
            told = {name: round(float(each.detach()), 4) for name, each in {"loss": loss, **notes}.items()}
            line = json.dumps({"step": step, "seconds": round(before + time.monotonic() - begun, 1), **told})
            print(line, flush=True)
            with log.open("a") as file:
                file.write(f"{line}\n")
    model.eval()
    return True


def begin_log(log: Path, resume: Path | None) -> float:
    """Starts a log, with what the run that goes on had told; the seconds that took."""
    told = (resume / log.name).read_text() if resume else ""
    log.write_text(told)
    return float(json.loads(told.splitlines()[-1])["seconds"]) if told else 0.0


def schedule(part: float) -> float:
    """Of the highest rate: up in a line, down as a cosine."""
    if part < WARM_UP:
        return (part + 1e-3) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (part - WARM_UP) / (1 - WARM_UP)))


def save_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: tuple[str, ...], parameters: tuple, step: int, out: Path
) -> None:
    """Weights in float32 and moments in bfloat16, in two files of which each is as large as the weights."""
    weights = {name: each.detach().contiguous() for name, each in zip(names, parameters, strict=True)}
    save_file({**weights, "step": torch.tensor(step)}, out / "weights.safetensors")
    moments = {
        f"{name}.{which}": optimizer.state[each][which].bfloat16()
        for name, each in zip(names, parameters, strict=True)
        for which in ("exp_avg", "exp_avg_sq")
        if each in optimizer.state
    }
    save_file(moments, out / "moments.safetensors")


def load_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, names: tuple[str, ...], parameters: tuple, folder: Path
) -> int:
    """The step to go on with."""
    weights, moments = load_file(folder / "weights.safetensors"), load_file(folder / "moments.safetensors")
    step = int(weights.pop("step"))
    with torch.no_grad():
        for name, each in zip(names, parameters, strict=True):
            each.copy_(weights[name])
            if f"{name}.exp_avg" not in moments:
                continue
            state = optimizer.state[each]
            state["step"] = torch.tensor(float(step), device=each.device)
            for which in ("exp_avg", "exp_avg_sq"):
                state[which] = moments[f"{name}.{which}"].to(each)
    return step
