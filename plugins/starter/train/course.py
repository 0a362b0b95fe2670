"""The course that a diffusion starter is trained on: VAE, latents of drawn scenes, flow, and a folder of diffusers."""

from __future__ import annotations

import argparse
import copy
import json
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from autoencoding import encode, fit_scale, scale, train_autoencoder, unscale
from flowing import Gallery, Predict, sample, train_flow
from folder import CARDS, name_processor, write_json
from pace import Pace
from pictures import Easel
from PIL import Image
from scenes import Scene, list_scenes
from torch import Generator, Tensor, nn
from transformers import PreTrainedTokenizerFast
from wording import build_tokenizer, list_texts, spell, spell_scenes

SHOWN = 32
"""Scenes that every look at a run shows, none of them trained on."""
CHUNK = 1000
"""Examples that are drawn and encoded at a time."""
BEFORE = ("date", "device", "seed", "batch", "steps", "minutes", "loss", "vae steps", "vae loss")
"""What a run that goes on tells of each one before it."""


@dataclass(frozen=True)
class Budget:
    """How much is made and learned. Steps are for a quiet H200; the clock ends a run that is slower."""

    examples: int
    batch: int
    steps: int
    vae_batch: int
    vae_steps: int


class Course(ABC):
    """What differs between the kinds of starters."""

    name: str
    side: int
    families: dict[str, float]
    """What is learned, and how often."""
    length: int
    """Tokens of a text."""
    vae_share: float
    """Of a run's minutes."""
    shift: float
    steps: int
    guidance: float
    """`shift`, `steps` and `guidance` as it is served."""

    @abstractmethod
    def make(self, tokenizer: PreTrainedTokenizerFast) -> Any:
        """A pipeline of diffusers with random weights."""

    @abstractmethod
    def parts(self, pipeline: Any) -> list[nn.Module]:
        """What the flow trains; the transformer first."""

    @abstractmethod
    def predict(self, pipeline: Any) -> Predict: ...

    def draw(self, easel: Easel, index: Tensor, generator: Generator) -> Tensor:
        """(batch, 3, [frames,] side, side) from 0 to 1."""
        return easel.draw(easel.lay(index, generator))

    @abstractmethod
    def find_faults(self, made: Any, scene: Scene) -> list[str]:
        """What is wrong with a picture or a clip, ([frames,] side, side, 3) uint8, of a scene."""

    def draw_lesson(self, easel: Easel, batch: int, generator: Generator, done: float) -> Tensor:
        """What the VAE learns from, in the shape of `draw`; `done` of its run, of 1."""
        return self.draw(easel, easel.choose(batch, generator, self.families), generator)


def train(course: Course, budget: Budget, scenes: list[Scene], shown: list[Scene], options: argparse.Namespace) -> None:
    """Writes the folder `options.out`: the model, its card, `training.json`, and `looks.png` of what it made last."""
    torch.manual_seed(options.seed)
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)  # its gradients fault on a Hopper card at these widths and batches
    device = torch.device(options.device)
    generator = Generator(device).manual_seed(options.seed)
    began = time.monotonic()
    report = {"date": time.strftime("%Y-%m-%d"), "device": name_device(device), "small": options.small}
    report |= {"seed": options.seed, "torch": torch.__version__, "scenes": len(scenes)}
    report |= {"examples": budget.examples, "batch": budget.batch}
    families = tuple(course.families)
    everything = [*list_scenes(families, held_out=False), *list_scenes(families, held_out=True)]
    tokenizer = build_tokenizer(list_texts(everything), course.length)
    pipeline = course.make(tokenizer)
    if options.resume is not None:
        pipeline = type(pipeline).from_pretrained(options.resume, torch_dtype=torch.float32)
        tokenizer = pipeline.tokenizer
        before = json.loads((options.resume / "training.json").read_text())
        report["before"] = [*before.get("before", []), {name: before[name] for name in BEFORE if name in before}]
    vae = pipeline.vae.to(device)
    easel = Easel(scenes, course.side, device)

    def draw(batch: int, done: float = 1.0) -> Tensor:
        return course.draw_lesson(easel, batch, generator, done)

    left = 1.0 if options.resume is not None else 1 - course.vae_share
    if options.resume is None:
        pace = Pace("vae", budget.vae_steps, options.minutes * course.vae_share)
        loss = train_autoencoder(vae, draw, batch=budget.vae_batch, pace=pace, recorded=not options.eager)
        report |= {"vae batch": budget.vae_batch, "vae steps": pace.step, "vae loss": round(loss, 4)}
        fit_scale(vae, draw, budget.vae_batch)
    vae.eval().requires_grad_(False)
    gallery = fill_gallery(course, easel, vae, tokenizer, budget.examples, generator)
    print(json.dumps({"run": "gallery", "examples": len(gallery.latents), "seconds": round(time.monotonic() - began)}))

    parts = [part.to(device) for part in course.parts(pipeline)]
    report["parameters"] = sum(weight.numel() for part in (vae, *parts) for weight in part.parameters())
    ids = spell([scene.caption for scene in shown], tokenizer).to(device)
    noise = torch.randn(len(shown), *gallery.latents.shape[1:], generator=Generator().manual_seed(1)).to(device)
    pace = Pace(course.name, budget.steps if options.steps is None else options.steps, options.minutes * left)

    def look(loss: float) -> None:
        copied = copy_pipeline(pipeline)
        kept = {"steps": course.steps, "scale": course.guidance, "shift": course.shift}
        made = decode(vae, sample(course.predict(copied), noise, ids, gallery.nothing, **kept))
        save(copied, options.out)
        show(made, options.out / "looks.png")
        report["looks right"] = count_right(course, made, shown)
        print(json.dumps({"run": course.name, "right": report["looks right"], "of": len(shown)}), flush=True)
        report.update(
            {"steps": pace.step, "loss": round(loss, 4), "minutes": round((time.monotonic() - began) / 60, 1)}
        )
        write_report(course.name, report, options.out)

    if device.type == "cuda" and not options.eager:
        torch._dynamo.config.suppress_errors = True  # a block that cannot be compiled runs as it was written
        parts[0].compile_repeated_blocks(dynamic=False)
    how = {"batch": budget.batch, "pace": pace, "shift": course.shift, "recorded": not options.eager}
    train_flow(course.predict(pipeline), parts, gallery, generator, look=look, **how)


def name_device(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else name_processor()


def write_report(name: str, report: dict[str, Any], folder: Path) -> None:
    """`training.json`, and the model card with it."""
    write_json(folder / "training.json", report)
    card = (CARDS / f"{name}.md").read_text()
    told = dict(report)
    for number, run in enumerate(told.pop("before", []), 1):
        told[f"run {number} of those before"] = ", ".join(f"{what} {value}" for what, value in run.items())
    rows = "\n".join(f"| {what.replace('_', ' ')} | {value} |" for what, value in told.items())
    (folder / "README.md").write_text(card.replace("TRAINING", rows))


def fill_gallery(
    course: Course, easel: Easel, vae: Any, tokenizer: PreTrainedTokenizerFast, count: int, generator: Generator
) -> Gallery:
    """`count` examples of the easel's scenes, drawn and encoded once."""
    latents, index = [], []
    chunk = min(count, CHUNK)
    for _ in range(-(-count // chunk)):
        chosen = easel.choose(chunk, generator, course.families)
        latents.append(scale(vae, encode(vae, course.draw(easel, chosen, generator))).to(torch.bfloat16))
        index.append(chosen)
    ids = spell_scenes(easel.scenes, tokenizer).to(easel.device)
    return Gallery(torch.cat(latents), torch.cat(index), ids, spell([""], tokenizer)[0].to(easel.device))


@torch.no_grad()
def decode(vae: Any, latents: Tensor) -> Tensor:
    """The flow's latents to (batch, 3, [frames,] side, side) from 0 to 1."""
    return (vae.decode(unscale(vae, latents)).sample.float() / 2 + 0.5).clamp(0, 1)


def copy_pipeline(pipeline: Any) -> Any:
    """With weights of its own, and nothing compiled."""
    parts = pipeline.components.items()
    return type(pipeline)(
        **{name: copy.deepcopy(part) if isinstance(part, nn.Module) else part for name, part in parts}
    )


def save(pipeline: Any, folder: Path) -> None:
    """In fp16, as diffusers does. The pipeline is of no use after that."""
    for part in pipeline.components.values():
        if isinstance(part, nn.Module):
            part.to("cpu", torch.float16)
    pipeline.save_pretrained(folder, safe_serialization=True)


def count_right(course: Course, made: Tensor, scenes: list[Scene]) -> float:
    """The share without a fault."""
    pixels = (made * 255).round().to("cpu", torch.uint8).movedim(1, -1).numpy()
    return sum(not course.find_faults(each, scene) for each, scene in zip(pixels, scenes, strict=True)) / len(scenes)


def show(pictures: Tensor, path: Path) -> None:
    """Eight in a row; of a clip, all frames in a row."""
    if pictures.dim() == 5:
        rows = [torch.cat(list(clip.unbind(1)), -1) for clip in pictures[:8]]
    else:
        rows = [torch.cat(list(row), -1) for row in pictures.split(8)]
    sheet = torch.cat(rows, -2).movedim(0, -1)
    Image.fromarray((sheet * 255).round().to("cpu", torch.uint8).numpy()).save(path)


def read_options(course: Course, minutes: float) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=f"Trains starter/{course.name}.")
    parser.add_argument("--out", type=Path, required=True, help="the folder that is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=minutes, help="at most, of VAE and flow together")
    parser.add_argument("--steps", type=int, help="of the flow")
    parser.add_argument("--small", action="store_true", help="few scenes and a smaller model, for two cores of a CPU")
    parser.add_argument("--resume", type=Path, help="a folder to go on from; its VAE stays as it is")
    parser.add_argument("--eager", action="store_true", help="a GPU compiles and records nothing")
    return parser.parse_args()
