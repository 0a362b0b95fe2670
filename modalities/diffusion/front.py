"""The device-free half of painting: prompts become ids, sizes are checked before anything is allocated."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError, InvalidRequest, ModelError
from polymux.core.pictures import open_picture
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Clip, Done, Film, Paint, Picture, Preview, Progress
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.diffusion.pictures import fit_picture, read_mask
from polymux.modalities.diffusion.recipes import Recipe, adjust_recipe, find_recipe, size_multiple
from polymux.modalities.diffusion.spelling import Speller
from polymux.modalities.diffusion.work import PICTURE, Painted, PaintWork, Prompt, Source

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

MOST_PIXELS = 4 << 20
"""Of one picture: 2048 x 2048."""
MOST_PIXELS_TOGETHER = 16 << 20
"""Of all pictures of one request."""
MOST_FILM_PIXELS = 256 << 20
"""Of all frames of a clip: 1280 x 720 for eighteen seconds."""
LONGEST_ASPECT = 8
MOST_PICTURES = 16
MOST_FRAMES = 1025
MOST_STEPS = 200
MOST_GUIDANCE = 100.0
MOST_PREVIEWS = 3

IMAGE_STRENGTH = 0.8
"""How much of a picture changes where nobody says how much, or where."""

PROGRESS, PREVIEW = "progress", "preview"

QUALITIES = ("exact", "balanced", "fast")


class PaintFront(Front):
    """`spellers` in the order of the recipe's readings."""

    def __init__(self, recipe: Recipe, spellers: list[Speller], multiple: int, quality: str = "") -> None:
        self.recipe = recipe
        self.spellers = spellers
        self.multiple = multiple
        self.quality = quality
        self.adapter: str | None = None
        self.adapters: tuple[str, ...] = ()

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any] | None = None) -> PaintFront:
        """Raises `ModelError` when a part is missing, `ConfigError` for an option that cannot be."""
        find = find_recipe(files)
        if find is None:
            raise ModelError(f"{files.reference} is of no kind that is painted with")
        options = options or {}
        recipe = adjust_recipe(find(files), options)
        spellers = [Speller.load(files, reading.tokenizer, reading.length) for reading in recipe.readings]
        front = cls(recipe, spellers, size_multiple(files, recipe.kind), str(options.get("quality", "")))
        front.adapters = tuple(options.get("adapters", ()))
        return front

    def variants(self) -> dict[str, Front]:
        """This front once per adapter; tokenizers are shared."""
        return {name: self._adapt(name) for name in self.adapters}

    def _adapt(self, name: str) -> PaintFront:
        front = copy(self)
        front.adapter, front.adapters = name, ()
        return front

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        recipe = self.recipe
        if not isinstance(ask, Film if recipe.frames else Paint):
            raise InvalidRequest(f"This model does not serve {task}.")
        width, height = self._size(ask)
        frames = self._frames(ask) if isinstance(ask, Film) else 1
        of_source = ask.source is not None and ask.width is None and recipe.frames is None
        whence = "; that is the image's own size: ask for another with size" if of_source else ""
        check_size(width, height, ask.n, self.multiple, whence)
        if width * height * frames * ask.n > MOST_FILM_PIXELS:
            raise InvalidRequest(f"{frames} frames of {width}x{height} are too many pixels", param="seconds")
        if recipe.most_pixels is not None and width * height * frames > recipe.most_pixels:
            asked = f"{width}x{height}" if frames == 1 else f"{frames} frames of {width}x{height}"
            said = f"{asked} have more than the {recipe.most_pixels} pixels of this model{whence}"
            raise InvalidRequest(said, param="size")
        steps = recipe.steps if ask.steps is None else ask.steps
        if not 1 <= steps <= MOST_STEPS:
            raise InvalidRequest(f"steps must be from 1 to {MOST_STEPS}", param="steps")
        if not 0 <= ask.previews <= MOST_PREVIEWS:
            raise InvalidRequest(f"partial_images must be from 0 to {MOST_PREVIEWS}", param="partial_images")
        quality = ask.quality or self.quality
        if quality and quality not in QUALITIES:
            raise InvalidRequest(f"quality is one of {', '.join(QUALITIES)}", param="quality")
        guidance, scale = self._scales(ask)
        negative = None
        if scale > 1.0:
            negative = self._spell(recipe.negative if ask.negative is None else ask.negative, "negative_prompt")
            if ask.negative is None:
                negative = Prompt(negative.ids, negative.lengths, empty=True)
        work = PaintWork(
            prompt=self._spell(ask.prompt, "prompt"),
            negative=negative,
            n=ask.n,
            width=width,
            height=height,
            frames=frames,
            steps=steps,
            guidance=guidance,
            scale=scale,
            seed=secrets.randbelow(1 << 31) if ask.seed is None else ask.seed,
            source=self._source(ask, width, height),
            previews=ask.previews,
            quality=quality,
            adapter=self.adapter,
            strict=ask.strict,
        )
        return Prepared(work)

    def _size(self, ask: Paint) -> tuple[int, int]:
        """What is not said is the source's size, else the model's own."""
        width, height = ask.width, ask.height
        if width is None or height is None:
            if ask.source is not None and self.recipe.frames is None:
                width, height = open_picture(ask.source, "image").size
            else:
                width, height = (math.ceil(side / self.multiple) * self.multiple for side in self.recipe.size)
        return width, height

    def _frames(self, ask: Film) -> int:
        default, apart = self.recipe.frames or (1, 1)
        frames = default if ask.frames is None else ask.frames
        if not 1 <= frames <= MOST_FRAMES or (frames - 1) % apart:
            raise InvalidRequest(
                f"{frames} frames cannot be made: a clip has 1 frame, or a multiple of {apart} and one more, "
                f"up to {MOST_FRAMES}",
                param="frames",
            )
        return frames

    def _scales(self, ask: Paint) -> tuple[float, float]:
        """What a distilled model reads, and the scale of classifier-free guidance."""
        recipe = self.recipe
        if recipe.scale > 1.0:  # one scale, whatever it is called
            if ask.guidance is not None and ask.true_scale is not None:
                raise InvalidRequest("give guidance or true_cfg_scale: this model has one scale", param="guidance")
            if ask.guidance is not None:
                return 1.0, check_scale(ask.guidance, recipe.scale, 1.0, "guidance")
            return 1.0, check_scale(ask.true_scale, recipe.scale, 1.0, "true_cfg_scale")
        if ask.guidance is not None and recipe.guidance is None:
            raise InvalidRequest("this model reads no guidance scale", param="guidance")
        scale = check_scale(ask.true_scale, 1.0, 1.0, "true_cfg_scale")
        if (ask.negative is not None) != (scale > 1.0):
            raise InvalidRequest("negative_prompt and a true_cfg_scale above 1 need each other", param="true_cfg_scale")
        return check_scale(ask.guidance, recipe.guidance or 1.0, 0.0, "guidance"), scale

    def _source(self, ask: Paint, width: int, height: int) -> Source | None:
        if ask.source is None:
            if self.recipe.starts_from:
                raise InvalidRequest("this model makes a clip of a picture: give one", param="input_reference")
            if ask.mask is not None or ask.strength is not None:
                raise InvalidRequest("a mask or a strength needs an image", param="image")
            return None
        if self.recipe.frames and not self.recipe.starts_from:
            raise InvalidRequest("this model makes clips of a text alone", param="input_reference")
        picture = open_picture(ask.source, "image")
        mask = None
        if ask.mask is not None:
            mask = read_mask(ask.mask, picture.size, (width, height))
        default = IMAGE_STRENGTH if mask is None else 1.0
        strength = default if ask.strength is None else ask.strength
        if not (math.isfinite(strength) and 0.0 < strength <= 1.0):
            raise InvalidRequest("strength must be above 0 and at most 1", param="strength")
        return Source(pixels=fit_picture(picture, width, height), mask=mask, strength=strength)

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        work = prepared.work
        if not isinstance(work, PaintWork):
            raise InternalError("a picture is presented that was not prepared")
        return PaintPresenter(self.recipe.fps, (work.width, work.height))

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "size_multiple": self.multiple,
            "max_pixels": MOST_PIXELS if self.recipe.most_pixels is None else self.recipe.most_pixels,
            "default_steps": self.recipe.steps,
            "default_size": "x".join(map(str, self.recipe.size)),
            **({"adapters": list(self.adapters)} if self.adapters else {}),
            **({"adapter": self.adapter} if self.adapter else {}),
        }
        if self.recipe.frames:
            default, apart = self.recipe.frames
            facts |= {"frames_per_second": self.recipe.fps, "default_frames": default, "frames_apart": apart}
        return facts

    def _spell(self, text: str, param: str) -> Prompt:
        prepared = self.recipe.prepare(text)
        spelled = [
            speller.spell(prepared, cut=reading.cut, padded=reading.padded, param=param)
            for speller, reading in zip(self.spellers, self.recipe.readings)
        ]
        return Prompt(tuple(ids for ids, _ in spelled), tuple(length for _, length in spelled))


class PaintPresenter(Presenter):
    """`fps` of clips; `size`, width and height, of what is made."""

    def __init__(self, fps: int, size: tuple[int, int]) -> None:
        self.fps = fps
        self.size = size

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(kind=kind, body=body) if kind == PROGRESS:
                return [unpack(body, Progress)]
            case Output(kind=kind, body=body) if kind == PREVIEW:
                preview = unpack(body, Preview)
                preview.of_width, preview.of_height = self.size
                return [preview]
            case Output(kind=kind, body=body) if kind == PICTURE:
                painted = unpack(body, Painted)
                if painted.pixels.ndim == 4:
                    return [Clip(painted.index, painted.seed, self.fps, painted.pixels)]
                height, width, _ = painted.pixels.shape
                return [Picture(painted.index, painted.seed, width, height, painted.pixels.tobytes())]
            case Ended(receipt=receipt):
                return [Done(Usage(input_tokens=receipt.input_units, output_tokens=receipt.output_units), receipt)]
        return []


def check_size(width: int, height: int, count: int, multiple: int, whence: str = "") -> None:
    """Raises `InvalidRequest` that says what would be served, and `whence` a size comes that nobody wrote."""
    if not 1 <= count <= MOST_PICTURES:
        raise InvalidRequest(f"n must be from 1 to {MOST_PICTURES}", param="n")
    if width < 1 or height < 1 or width % multiple or height % multiple:
        wanted = f"width and height must be multiples of {multiple}, at least {multiple}"
        raise InvalidRequest(f"{width}x{height} cannot be made: {wanted}{whence}", param="size")
    if width * height > MOST_PIXELS:
        raise InvalidRequest(f"{width}x{height} has more than {MOST_PIXELS} pixels{whence}", param="size")
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
