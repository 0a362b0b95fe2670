"""The device-free half of painting: prompts become ids, sizes are checked before anything is allocated."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Done, Paint, Picture, Progress
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.diffusion.spelling import Speller
from polymux.modalities.diffusion.work import PICTURE, Painted, PaintWork, Prompt

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

MOST_PIXELS = 4 << 20
"""Of one picture: 2048 x 2048."""
MOST_PIXELS_TOGETHER = 16 << 20
"""Of all pictures of one request."""
LONGEST_ASPECT = 8
MOST_PICTURES = 16
MOST_STEPS = 200
MOST_GUIDANCE = 100.0

CLIP_TOKENS = 77
SIDE = 1024
PROGRESS = "progress"


@dataclass(frozen=True)
class Habits:
    """What one model does by default, and what its sizes divide into."""

    multiple: int
    steps: int
    tokens: int
    """Of a prompt at most."""
    guided: bool
    """Whether it was distilled to read a guidance scale."""

    @classmethod
    def read(cls, files: ModelFiles) -> Habits:
        levels = len(read_part(files, "vae").get("block_out_channels", [0] * 4))
        guided = bool(read_part(files, "transformer").get("guidance_embeds"))
        return cls(multiple=2**levels, steps=28 if guided else 4, tokens=512 if guided else 256, guided=guided)


class PaintFront(Front):
    def __init__(self, pooled: Speller, tokens: Speller, habits: Habits) -> None:
        self.pooled = pooled
        self.tokens = tokens
        self.habits = habits

    @classmethod
    def load(cls, files: ModelFiles) -> PaintFront:
        """Raises `ModelError` when a part is missing."""
        habits = Habits.read(files)
        return cls(
            Speller.load(files, "tokenizer", CLIP_TOKENS), Speller.load(files, "tokenizer_2", habits.tokens), habits
        )

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if not isinstance(ask, Paint):
            raise InvalidRequest(f"This model does not serve {task}.")
        side = math.ceil(SIDE / self.habits.multiple) * self.habits.multiple
        width = side if ask.width is None else ask.width
        height = side if ask.height is None else ask.height
        check_size(width, height, ask.n, self.habits.multiple)
        steps = self.habits.steps if ask.steps is None else ask.steps
        if not 1 <= steps <= MOST_STEPS:
            raise InvalidRequest(f"steps must be from 1 to {MOST_STEPS}", param="steps")
        if ask.guidance is not None and not self.habits.guided:
            raise InvalidRequest("this model reads no guidance scale", param="guidance")
        guidance = check_scale(ask.guidance, 3.5, 0.0, "guidance")
        scale = check_scale(ask.true_scale, 1.0, 1.0, "true_cfg_scale")
        if (ask.negative is not None) != (scale > 1.0):
            raise InvalidRequest("negative_prompt and a true_cfg_scale above 1 need each other", param="true_cfg_scale")
        work = PaintWork(
            prompt=self._spell(ask.prompt, "prompt"),
            negative=None if ask.negative is None else self._spell(ask.negative, "negative_prompt"),
            n=ask.n,
            width=width,
            height=height,
            steps=steps,
            guidance=guidance,
            true_scale=scale,
            seed=secrets.randbelow(1 << 31) if ask.seed is None else ask.seed,
        )
        return Prepared(work)

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return PaintPresenter()

    def describe(self) -> dict[str, Any]:
        return {"size_multiple": self.habits.multiple, "max_pixels": MOST_PIXELS, "default_steps": self.habits.steps}

    def _spell(self, text: str, param: str) -> Prompt:
        """What exceeds CLIP's window is still read by the other encoder, as the model was trained."""
        return Prompt(self.pooled.spell(text, cut=True, param=param), self.tokens.spell(text, cut=False, param=param))


class PaintPresenter(Presenter):
    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == PROGRESS:
                return [unpack(body, Progress)]
            case Output(kind=kind, body=body) if kind == PICTURE:
                painted = unpack(body, Painted)
                height, width, _ = painted.pixels.shape
                return [Picture(painted.index, painted.seed, width, height, painted.pixels.tobytes())]
            case Ended(receipt=receipt):
                return [Done(Usage(input_tokens=receipt.input_units, output_tokens=receipt.output_units), receipt)]
        return []


def read_part(files: ModelFiles, name: str) -> dict[str, Any]:
    return files.json(f"{name}/config.json")


def check_size(width: int, height: int, count: int, multiple: int) -> None:
    """Raises `InvalidRequest` that says what would be served."""
    if not 1 <= count <= MOST_PICTURES:
        raise InvalidRequest(f"n must be from 1 to {MOST_PICTURES}", param="n")
    if width < 1 or height < 1 or width % multiple or height % multiple:
        raise InvalidRequest(
            f"{width}x{height} cannot be painted: width and height must be multiples of {multiple}", param="size"
        )
    if width * height > MOST_PIXELS:
        raise InvalidRequest(f"{width}x{height} has more than {MOST_PIXELS} pixels", param="size")
    if max(width, height) > LONGEST_ASPECT * min(width, height):
        raise InvalidRequest(f"one side may be {LONGEST_ASPECT} times the other at most", param="size")
    if width * height * count > MOST_PIXELS_TOGETHER:
        raise InvalidRequest(f"{count} times {width}x{height} has more than {MOST_PIXELS_TOGETHER} pixels", param="n")


def check_scale(given: float | None, default: float, least: float, param: str) -> float:
    if given is None:
        return default
    if not (math.isfinite(given) and least <= given <= MOST_GUIDANCE):
        raise InvalidRequest(f"{param} must be from {least:g} to {MOST_GUIDANCE:g}", param=param)
    return given
