"""Frames as files: exactly so many, exactly that large, exactly that fast."""

from __future__ import annotations

import io
import tempfile
from fractions import Fraction
from itertools import pairwise
from typing import Any, Literal

import numpy as np
from PIL import Image

from polymux.core.errors import InvalidRequest

ClipFormat = Literal["mp4", "gif", "webp"]

MEDIA: dict[ClipFormat, str] = {"mp4": "video/mp4", "gif": "image/gif", "webp": "image/webp"}

QUALITY = "18"
"""x264's constant rate factor: what eyes do not tell from the frames."""


def check_clip(width: int, height: int, format: ClipFormat) -> None:
    """Raises `InvalidRequest` for a size that the format cannot hold: mp4 players read colours of two by two pixels."""
    if format == "mp4" and (width % 2 or height % 2):
        raise InvalidRequest(
            f"mp4 has even sides only, not {width}x{height}; ask for another size, or for gif or webp", param="size"
        )


def encode_clip(frames: np.ndarray, rate: int, format: ClipFormat) -> bytes:
    """A file of (frames, height, width, 3) uint8, `rate` frames a second. Takes seconds: call it on a thread."""
    check_clip(frames.shape[2], frames.shape[1], format)
    return _encode_mp4(frames, rate) if format == "mp4" else _encode_pictures(frames, rate, format)


def encode_thumbnail(frames: np.ndarray) -> bytes:
    """The first frame, as webp."""
    file = io.BytesIO()
    Image.fromarray(frames[0]).save(file, "WEBP", quality=90)
    return file.getvalue()


def _encode_mp4(frames: np.ndarray, rate: int) -> bytes:
    """With its index first, so that it plays while it is loaded: that needs a file, not a buffer."""
    import av

    count, height, width, _ = frames.shape
    with tempfile.NamedTemporaryFile(prefix="polymux-clip-", suffix=".mp4") as file:
        with av.open(file.name, "w", options={"movflags": "+faststart"}) as container:
            stream: Any = container.add_stream("libx264", rate=rate, options={"crf": QUALITY, "preset": "medium"})
            stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
            stream.time_base = Fraction(1, rate)
            for place in range(count):
                frame = av.VideoFrame.from_ndarray(frames[place], format="rgb24")
                frame.pts, frame.time_base = place, Fraction(1, rate)
                container.mux(stream.encode(frame))
            container.mux(stream.encode(None))
        return file.read()


def _encode_pictures(frames: np.ndarray, rate: int, format: ClipFormat) -> bytes:
    """Frames last whole hundredths (gif) or thousandths of a second; they are spread so that the sum is right."""
    unit = 10 if format == "gif" else 1
    ends = [round(place * 1000 / rate / unit) * unit for place in range(len(frames) + 1)]
    durations = [later - earlier for earlier, later in pairwise(ends)]
    pictures = [Image.fromarray(frame) for frame in frames]
    file = io.BytesIO()
    options: dict[str, Any] = {"quality": 90, "minimize_size": False} if format == "webp" else {"optimize": False}
    if len(pictures) > 1:
        options |= {"save_all": True, "append_images": pictures[1:], "duration": durations, "loop": 0}
    pictures[0].save(file, format.upper(), **options)
    return file.getvalue()
