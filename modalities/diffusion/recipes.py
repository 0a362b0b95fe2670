"""What a front must know of each kind of diffusers pipeline: how it reads a prompt, and what it does by default.

The kind is the class that a folder's `model_index.json` names. All else is read from the parts' configurations.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from polymux.core.errors import ConfigError

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

CLIP_TOKENS = 77

QWEN_TEMPLATE = (
    "<|im_start|>system\nDescribe the image by detailing the color, shape, size, texture, quantity, text, spatial "
    "relationships of the objects and background:<|im_end|>\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
)
"""What Qwen-Image was trained to read around a prompt."""

QWEN_PREFIX = 34
"""Tokens of the template before the prompt: the transformer does not see them."""


@dataclass(frozen=True)
class Reading:
    """How one encoder takes a text. `tokenizer` is the folder of its tokenizer."""

    tokenizer: str
    length: int
    """Ids at most."""
    cut: bool = False
    """A longer text loses its end, as the model was trained: another encoder reads all of it."""
    padded: bool = True
    """To `length`."""


@dataclass(frozen=True)
class Recipe:
    """Defaults and limits of one kind of model."""

    kind: str
    """The engine's name for it (`families`)."""
    readings: tuple[Reading, ...]
    steps: int
    scale: float
    """Of classifier-free guidance by default; 1: none unless it is asked for with a negative prompt."""
    guidance: float | None = None
    """Of a guidance-distilled model by default; None: it reads none."""
    size: tuple[int, int] = (1024, 1024)
    """Width and height by default."""
    negative: str = ""
    """What stands in for a negative prompt that is not given."""
    frames: tuple[int, int] | None = None
    """Of a clip: by default, and latent frames are so many apart. None: it paints pictures."""
    fps: int = 16
    most_pixels: int | None = None
    """Of a picture, or of all frames of a clip, where the operator bounds them; None: what any model may make."""
    starts_from: bool = False
    """A clip begins with a given picture, which it cannot do without."""
    prepare: Callable[[str], str] = str
    """What is done to a text before it is spelled."""


def read_part(files: ModelFiles, name: str) -> dict[str, Any]:
    return files.json(f"{name}/config.json")


def _vae_scale(files: ModelFiles) -> int:
    return 2 ** (len(read_part(files, "vae").get("block_out_channels", [0] * 4)) - 1)


def _square(part: dict[str, Any], default: int, scale: int) -> tuple[int, int]:
    side = part.get("sample_size") or default
    side = side if isinstance(side, int) else side[0]
    return side * scale, side * scale


def _length(files: ModelFiles, tokenizer: str, most: int) -> int:
    """What a small model's tokenizer says is all it reads, where that is less than its kind does."""
    told = files.json(f"{tokenizer}/tokenizer_config.json").get("model_max_length")
    return int(min(most, told)) if isinstance(told, int | float) and told >= 1 else most


def _read_clip(files: ModelFiles, tokenizer: str = "tokenizer") -> Reading:
    return Reading(tokenizer, _length(files, tokenizer, CLIP_TOKENS), cut=True)


def _flux(files: ModelFiles) -> Recipe:
    guided = bool(read_part(files, "transformer").get("guidance_embeds"))
    readings = (_read_clip(files), Reading("tokenizer_2", _length(files, "tokenizer_2", 512 if guided else 256)))
    return Recipe("flux", readings, 28 if guided else 4, 1.0, guidance=3.5 if guided else None)


def _sd3(files: ModelFiles) -> Recipe:
    readings = [_read_clip(files), _read_clip(files, "tokenizer_2")]
    if files.has("text_encoder_3"):
        readings.append(Reading("tokenizer_3", _length(files, "tokenizer_3", 256)))
    size = _square(read_part(files, "transformer"), 128, _vae_scale(files))
    return Recipe("sd3", tuple(readings), 28, 7.0, size=size)


def _sd(files: ModelFiles) -> Recipe:
    size = _square(read_part(files, "unet"), 64, _vae_scale(files))
    return Recipe("sd", (_read_clip(files),), 50, 7.5, size=size)


def _sdxl(files: ModelFiles) -> Recipe:
    readings = (Reading("tokenizer", CLIP_TOKENS, cut=True), Reading("tokenizer_2", CLIP_TOKENS, cut=True))
    size = _square(read_part(files, "unet"), 128, _vae_scale(files))
    return Recipe("sdxl", readings, 50, 5.0, size=size)


def _pixart(files: ModelFiles) -> Recipe:
    sigma = files.json("model_index.json").get("_class_name") == "PixArtSigmaPipeline"
    size = _square(read_part(files, "transformer"), 128, _vae_scale(files))
    reading = Reading("tokenizer", _length(files, "tokenizer", 300 if sigma else 120))
    return Recipe("pixart", (reading,), 20, 4.5, size=size, prepare=lambda text: text.lower().strip())


def _qwen(files: ModelFiles) -> Recipe:
    reading = Reading("tokenizer", 1024 + QWEN_PREFIX, padded=False)
    return Recipe("qwen", (reading,), 50, 4.0, negative=" ", prepare=QWEN_TEMPLATE.format)


def _wan(files: ModelFiles) -> Recipe:
    apart = read_part(files, "vae").get("scale_factor_temporal") or 4
    return Recipe(
        "wan",
        (Reading("tokenizer", _length(files, "tokenizer", 512)),),
        50,
        5.0,
        size=(832, 480),
        frames=(81, apart),
        starts_from=files.json("model_index.json").get("_class_name") == "WanImageToVideoPipeline",
        prepare=lambda text: re.sub(r"\s+", " ", html.unescape(html.unescape(text))).strip(),
    )


RECIPES: dict[str, Callable[[ModelFiles], Recipe]] = {
    "FluxPipeline": _flux,
    "StableDiffusion3Pipeline": _sd3,
    "StableDiffusionPipeline": _sd,
    "StableDiffusionXLPipeline": _sdxl,
    "PixArtAlphaPipeline": _pixart,
    "PixArtSigmaPipeline": _pixart,
    "QwenImagePipeline": _qwen,
    "WanPipeline": _wan,
    "WanImageToVideoPipeline": _wan,
}
"""By the class in `model_index.json`."""


def find_recipe(files: ModelFiles) -> Callable[[ModelFiles], Recipe] | None:
    return RECIPES.get(str(files.json("model_index.json").get("_class_name")))


NUMBERS: tuple[tuple[str, str, Any], ...] = (
    ("steps", "steps", int),
    ("fps", "fps", int),
    ("scale", "scale", (int, float)),
    ("max_pixels", "most_pixels", int),
)
"""Options that are numbers, and the fields of a recipe that they set."""


def adjust_recipe(recipe: Recipe, options: Mapping[str, Any]) -> Recipe:
    """The recipe with the defaults that a model's options name: `steps`, `scale`, `size` ("64x64"), `frames`, `fps`;
    and the bound that they set, `max_pixels`. Raises `ConfigError` for one that cannot be.
    """
    changes: dict[str, Any] = {}
    for name, place, kinds in NUMBERS:
        if name in options:
            value = options[name]
            if not isinstance(value, kinds) or isinstance(value, bool) or not 1 <= value < math.inf:
                raise ConfigError(f"the option {name} is a number from 1, not {value!r}", param=name)
            changes[place] = value
    if "size" in options:
        told = re.fullmatch(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})", str(options["size"]))
        if told is None:
            raise ConfigError(f"the option size is WIDTHxHEIGHT, not {options['size']!r}", param="size")
        changes["size"] = (int(told[1]), int(told[2]))
    if "frames" in options:
        frames = options["frames"]
        if recipe.frames is None or not isinstance(frames, int) or frames < 1 or (frames - 1) % recipe.frames[1]:
            raise ConfigError(f"the option frames cannot be {frames!r} for this model", param="frames")
        changes["frames"] = (frames, recipe.frames[1])
    return replace(recipe, **changes)


def size_multiple(files: ModelFiles, kind: str) -> int:
    """What width and height of this model's pictures are multiples of."""
    vae = read_part(files, "vae")
    if kind == "wan":
        patch = read_part(files, "transformer").get("patch_size") or (1, 2, 2)
        return int(vae.get("scale_factor_spatial") or 8) * int(patch[1])
    if kind == "qwen":
        return 2 ** len(vae.get("temperal_downsample") or [0] * 3) * 2
    if kind in ("sd", "sdxl"):
        return _vae_scale(files)
    patch = read_part(files, "transformer").get("patch_size") or 2
    return _vae_scale(files) * (2 if kind == "flux" else patch)
