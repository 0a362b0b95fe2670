"""Picture files that a request brings: read once, bounded, turned upright."""

from __future__ import annotations

import io
import warnings

import numpy as np
from PIL import Image, ImageOps

from polymux.core.errors import InvalidRequest

MOST_READ = 64 << 20
"""Pixels of a file: more are refused before they are decoded."""


def read_picture(file: bytes, param: str) -> Image.Image:
    """The first frame of a picture file, upright. Raises `InvalidRequest` for what is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # our own bound is lower
            picture = Image.open(io.BytesIO(file))
        if picture.width * picture.height > MOST_READ:
            raise InvalidRequest(f"the picture has more than {MOST_READ} pixels", param=param)
        picture.load()
        upright = ImageOps.exif_transpose(picture)
    except InvalidRequest:
        raise
    except Exception as error:  # Pillow's readers raise whatever they like on a broken file
        raise InvalidRequest(f"the file is no picture that can be read: {error}", param=param) from None
    return picture if upright is None else upright


def fit_picture(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8, resized where it must be; what is transparent shows black."""
    plain = picture.convert("RGBA")
    ground = Image.new("RGBA", plain.size, (0, 0, 0, 255))
    flat = Image.alpha_composite(ground, plain).convert("RGB") if picture.mode in ("RGBA", "LA", "PA") else plain
    flat = flat.convert("RGB")
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.LANCZOS)
    return np.array(flat)


def read_mask(file: bytes, size: tuple[int, int], wanted: tuple[int, int]) -> np.ndarray:
    """(height, width) uint8 of the `wanted` size: 1 where the mask is transparent, which is painted anew.

    Raises `InvalidRequest` for a mask that is not of the picture's `size`, or that has no transparency.
    """
    mask = read_picture(file, "mask")
    if mask.size != size:
        raise InvalidRequest(
            f"the mask is {mask.width}x{mask.height}, the image {size[0]}x{size[1]}: they must agree", param="mask"
        )
    if "A" not in mask.getbands() and "transparency" not in mask.info:
        raise InvalidRequest("the mask has no alpha channel: its transparent pixels are painted anew", param="mask")
    alpha = mask.convert("RGBA").getchannel("A")
    if alpha.size != wanted:
        alpha = alpha.resize(wanted, Image.Resampling.NEAREST)
    return (np.array(alpha) < 128).astype(np.uint8)
