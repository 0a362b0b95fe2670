"""Reading pictures that strangers send: any format Pillow reads, bounded before anything is decoded.

What comes out is what a viewer shows: turned as EXIF says, on white where it is transparent, 8 bits a channel, the
first frame of an animation.
"""

from __future__ import annotations

import base64
import binascii
import io
import re
import warnings
from urllib.parse import unquote_to_bytes

import numpy as np
from PIL import Image, ImageOps

from polymux.core.errors import InvalidRequest

MOST_PIXELS = 64 << 20
"""Of one picture, as its header says."""
LONGEST_SIDE = 1 << 15

REFUSED = frozenset({"EPS", "WMF", "GRIB", "BUFR", "HDF5", "MPEG", "FPX", "MIC"})
"""Formats that are programs, need one, or are only recognised."""

DATA_URI = re.compile(r"data:(?P<kind>[^,;]*)(?P<options>(;[^,;]*)*),", re.IGNORECASE)


def read_picture(data: bytes, param: str) -> Image.Image:
    """RGB. Raises `InvalidRequest` as `open_picture` does."""
    return flatten(open_picture(data, param))


def open_picture(data: bytes, param: str) -> Image.Image:
    """Upright and loaded, of any mode, so that what is transparent can be told. Raises `InvalidRequest` naming `param`
    for what is no picture, is broken, or is too large."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = Image.open(io.BytesIO(data), formats=_allowed())
            _check_size(picture.size, param)
            picture.load()
        picture = ImageOps.exif_transpose(picture) or picture
        _check_size(picture.size, param)
        return picture
    except InvalidRequest:
        raise
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise InvalidRequest(f"{param} has more than {MOST_PIXELS} pixels.", param=param) from error
    except Image.UnidentifiedImageError as error:
        raise InvalidRequest(f"{param} is no picture in a format that is read here.", param=param) from error
    except MemoryError as error:
        raise InvalidRequest(f"{param} takes more memory than there is.", param=param) from error
    except Exception as error:  # each format's reader fails in its own ways
        raise InvalidRequest(f"{param} cannot be read: {error or type(error).__name__}", param=param) from error


def flatten(picture: Image.Image) -> Image.Image:
    """Any mode as RGB, 8 bits a channel; what is transparent lies on white."""
    if picture.mode == "RGB" and "transparency" not in picture.info:
        return picture
    if picture.mode == "F" or picture.mode.startswith("I"):
        return Image.fromarray(_narrow(np.asarray(picture))).convert("RGB")
    if picture.mode in ("RGBA", "LA", "PA", "RGBa", "La") or "transparency" in picture.info:
        picture = picture.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")
    return picture.convert("RGB")


def read_data_uri(uri: str, param: str) -> bytes:
    """The bytes of a base64 data URI; white space, missing padding and the URL-safe alphabet are read too.

    Raises `InvalidRequest` for everything else.
    """
    match = DATA_URI.match(uri)
    if match is None:
        raise InvalidRequest(f"{param} is no data URI (data:image/png;base64,...).", param=param)
    if "base64" not in match["options"].lower().split(";"):
        raise InvalidRequest(f"{param} must be base64: data:image/png;base64,...", param=param)
    body = uri[match.end() :]
    text = unquote_to_bytes(body) if "%" in body else body.encode("ascii", "replace")
    text = text.translate(bytes.maketrans(b"-_", b"+/"), b" \t\r\n\f\v").rstrip(b"=")
    try:
        data = base64.b64decode(text + b"=" * (-len(text) % 4), validate=True)
    except binascii.Error as error:
        raise InvalidRequest(f"{param} is not valid base64: {error}", param=param) from error
    if not data:
        raise InvalidRequest(f"{param} is empty.", param=param)
    return data


def read_source(source: str | bytes, param: str) -> Image.Image:
    """A picture from a data URI, or from the bytes of a file."""
    return read_picture(source if isinstance(source, bytes) else read_data_uri(source, param), param)


def _allowed() -> list[str]:
    Image.init()
    return [name for name in Image.ID if name not in REFUSED]


def _check_size(size: tuple[int, int], param: str) -> None:
    width, height = size
    if width < 1 or height < 1:
        raise InvalidRequest(f"{param} has no pixels.", param=param)
    if width * height > MOST_PIXELS or max(size) > LONGEST_SIDE:
        raise InvalidRequest(
            f"{param} is {width}x{height}; at most {MOST_PIXELS} pixels, {LONGEST_SIDE} a side, are read.", param=param
        )


def _narrow(values: np.ndarray) -> np.ndarray:
    """Brightness of 16 or 32 bits, or real, as 8 bits."""
    values = np.nan_to_num(values.astype(np.float64), posinf=0.0, neginf=0.0)
    highest = values.max(initial=0.0)
    if highest <= 1.0 and (values % 1).any():
        values = values * 255
    elif highest > 255:
        values = values / (257 if highest <= 65535 else highest / 255)
    return values.clip(0, 255).round().astype(np.uint8)
