"""Picture files that a request brings: fitted to what is painted."""

from __future__ import annotations

import numpy as np
from PIL import Image

from polymux.core.errors import InvalidRequest
from polymux.core.pictures import flatten, open_picture


def fit_picture(picture: Image.Image, width: int, height: int) -> np.ndarray:
    """(height, width, 3) uint8, resized where it must be; what is transparent shows black."""
    if picture.mode in ("RGBA", "LA", "PA") or "transparency" in picture.info:
        plain = picture.convert("RGBA")
        flat = Image.alpha_composite(Image.new("RGBA", plain.size, (0, 0, 0, 255)), plain).convert("RGB")
    else:
        flat = flatten(picture)
    if flat.size != (width, height):
        flat = flat.resize((width, height), Image.Resampling.LANCZOS)
    return np.array(flat)


def read_mask(file: bytes, size: tuple[int, int], wanted: tuple[int, int]) -> np.ndarray:
    """(height, width) uint8 of the `wanted` size: 1 where the mask is transparent, which is painted anew.

    Raises `InvalidRequest` for a mask that is not of the picture's `size`, or that has no transparency.
    """
    mask = open_picture(file, "mask")
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
