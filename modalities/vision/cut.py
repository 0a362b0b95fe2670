"""What a picture becomes before it is encoded: resized and cut as the model's processor does, and how many vectors
that will be. Pixels stay bytes: they are scaled on the device.

Each class follows the processor of transformers whose configuration it reads, in its Pillow form.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from polymux.core.cache.content import content_digest
from polymux.core.errors import InvalidRequest, ModelError

LOW = 512
"""Pixels of a side at most, where a picture of low detail is asked for."""

FLATTEST = 200
"""How many times longer than the other a side may be."""


@dataclass(frozen=True)
class Piece:
    """Pixels, (frames or tiles, height, width, 3) uint8, for one item of the encoder, and the stretches of vectors it
    becomes. `grid`: frames, height and width of them, where they stand so."""

    pixels: np.ndarray
    counts: list[int]
    size: tuple[int, int] = (0, 0)
    grid: tuple[int, int, int] | None = None
    interval: float = 1.0

    @property
    def digest(self) -> bytes:
        return content_digest(self.pixels, *map(str, self.size))


@dataclass(frozen=True)
class Cut:
    """A picture's pieces, and what stands for it in the prompt: one mark for every stretch, and words between."""

    pieces: list[Piece]
    text: str


class Cutter(ABC):
    """`mark` is what templates write for a picture, and one vector's place in the prompt."""

    mark: str
    clip_mark: str | None = None
    """The same for clips; None: the model reads none."""

    @abstractmethod
    def cut(self, picture: Image.Image, detail: str, *, alone: bool) -> Cut:
        """`picture` is RGB; `alone`: it is the prompt's only one. Raises `InvalidRequest`."""

    def cut_clip(self, frames: Sequence[Image.Image], seconds: Sequence[float]) -> Cut:
        """Frames with the times at which they are seen. Raises `InvalidRequest`."""
        raise InvalidRequest("This model does not read video.", param="messages")


def resample_of(config: Mapping[str, Any], default: Image.Resampling) -> Image.Resampling:
    return Image.Resampling(config.get("resample", default))


def resize(picture: Image.Image, height: int, width: int, resample: Image.Resampling) -> Image.Image:
    return picture if picture.size == (width, height) else picture.resize((width, height), resample)


def as_tile(picture: Image.Image) -> np.ndarray:
    return np.asarray(picture)[None]


def limit(picture: Image.Image, detail: str) -> Image.Image:
    """A picture of low detail is made small before anything else."""
    if detail != "low" or max(picture.size) <= LOW:
        return picture
    picture = picture.copy()
    picture.thumbnail((LOW, LOW), Image.Resampling.BICUBIC)
    return picture


class TileCutter(Cutter):
    """One tile of a fixed size, its middle cropped (LLaVA, CLIP)."""

    def __init__(self, config: Mapping[str, Any], mark: str, vectors: int) -> None:
        self.mark = mark
        self._vectors = vectors
        self._resample = resample_of(config, Image.Resampling.BICUBIC)
        self._size = config.get("size") or {}
        crop = config.get("crop_size") or {}
        self._crop = None
        if config.get("do_center_crop"):
            self._crop = (crop["height"], crop["width"]) if isinstance(crop, Mapping) else (crop, crop)
        self._fill = None
        if config.get("do_pad"):
            self._fill = tuple(int(mean * 255) for mean in config.get("image_mean") or (0, 0, 0))

    def cut(self, picture: Image.Image, detail: str, *, alone: bool) -> Cut:
        return Cut([Piece(self.shape(picture), [self._vectors])], self.mark)

    def shape(self, picture: Image.Image) -> np.ndarray:
        """(1, height, width, 3)."""
        if self._fill is not None:
            picture = pad_to_square(picture, self._fill)
        picture = resize(picture, *fit_size(picture.height, picture.width, self._size), self._resample)
        if self._crop is not None:
            picture = crop_middle(picture, *self._crop)
        return as_tile(picture)


def fit_size(height: int, width: int, size: Mapping[str, int]) -> tuple[int, int]:
    """The size that a processor's `size` asks for: both sides, or the shorter one."""
    if "height" in size and "width" in size:
        return size["height"], size["width"]
    if "shortest_edge" not in size:
        raise ModelError(f"the processor's size {dict(size)} is not known here")
    short = size["shortest_edge"]
    if width <= height:
        return int(short * height / width), short
    return short, int(short * width / height)


def crop_middle(picture: Image.Image, height: int, width: int) -> Image.Image:
    """What a smaller picture lacks is black."""
    left, top = (picture.width - width) // 2, (picture.height - height) // 2
    return picture.crop((left, top, left + width, top + height))


def pad_to_square(picture: Image.Image, fill: tuple[int, ...]) -> Image.Image:
    side = max(picture.size)
    square = Image.new("RGB", (side, side), fill)
    square.paste(picture, ((side - picture.width) // 2, (side - picture.height) // 2))
    return square


class SplitCutter(Cutter):
    """The picture in tiles, then the whole as one more (Idefics3, SmolVLM)."""

    def __init__(self, config: Mapping[str, Any], mark: str, vectors: int) -> None:
        self.mark = mark
        self._vectors = vectors
        self._resample = resample_of(config, Image.Resampling.LANCZOS)
        self._longest = (config.get("size") or {}).get("longest_edge", 4 * 364)
        self._side = (config.get("max_image_size") or {}).get("longest_edge", 364)
        self._splits = config.get("do_image_splitting", True)
        self._resizes = config.get("do_resize", True)

    def cut(self, picture: Image.Image, detail: str, *, alone: bool) -> Cut:
        side = self._side
        if self._resizes:
            picture = resize(picture, *self._bound(picture.height, picture.width), self._resample)
        if not self._splits or detail == "low":
            return self._tell([resize(picture, side, side, self._resample)], 0, 0)
        picture = resize(picture, *self._round(picture.height, picture.width), self._resample)
        rows, columns = picture.height // side, picture.width // side
        if rows == columns == 1:
            return self._tell([picture], 0, 0)
        tiles = [
            picture.crop((column * side, row * side, (column + 1) * side, (row + 1) * side))
            for row in range(rows)
            for column in range(columns)
        ]
        return self._tell([*tiles, resize(picture, side, side, self._resample)], rows, columns)

    def _tell(self, tiles: list[Image.Image], rows: int, columns: int) -> Cut:
        fence = "<fake_token_around_image>"
        lines = [
            "".join(f"{fence}<row_{row + 1}_col_{column + 1}>{self.mark}" for column in range(columns))
            for row in range(rows)
        ]
        text = "".join(f"{line}\n" for line in lines) + ("\n" if rows else "")
        pieces = [Piece(as_tile(tile), [self._vectors]) for tile in tiles]
        return Cut(pieces, f"{text}{fence}<global-img>{self.mark}{fence}")

    def _bound(self, height: int, width: int) -> tuple[int, int]:
        """The longer side as long as the processor says, the other even."""
        ratio = width / height
        if width >= height:
            width = self._longest
            height = int(width / ratio)
            height += height % 2
        else:
            height = self._longest
            width = int(height * ratio)
            width += width % 2
        return max(height, 1), max(width, 1)

    def _round(self, height: int, width: int) -> tuple[int, int]:
        """Up to whole tiles, the longer side first."""
        ratio, side = width / height, self._side
        if width >= height:
            width = math.ceil(width / side) * side
            return math.ceil(int(width / ratio) / side) * side or side, width
        height = math.ceil(height / side) * side
        return height, math.ceil(int(height * ratio) / side) * side or side


class AnyresCutter(Cutter):
    """The whole picture, then tiles of the grid that suits its shape best (LLaVA-OneVision)."""

    def __init__(self, config: Mapping[str, Any], model: Mapping[str, Any], mark: str, across: int) -> None:
        """`across`: vectors of a tile's side."""
        self.mark = mark
        self._across = across
        self._resample = resample_of(config, Image.Resampling.BICUBIC)
        size = config.get("size") or {}
        self._side: int = size.get("height") or size["shortest_edge"]
        self._grids = [tuple(each) for each in config.get("image_grid_pinpoints") or model["image_grid_pinpoints"]]
        self._most = int(str(model.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
        self._fill = tuple(int(mean * 255) for mean in config.get("image_mean") or (0, 0, 0))

    def cut(self, picture: Image.Image, detail: str, *, alone: bool) -> Cut:
        side = self._side
        if not alone or detail == "low":
            square = resize(pad_to_square(picture, self._fill), side, side, self._resample)
            return Cut([Piece(as_tile(square), [self._across**2 + 1])], self.mark)
        height, width = picture.height, picture.width
        grid = self._choose(height, width)
        fitted = resize(picture, *fit_inside(height, width, grid), self._resample)
        padded = Image.new("RGB", (grid[1], grid[0]))
        padded.paste(fitted, ((grid[1] - fitted.width) // 2, (grid[0] - fitted.height) // 2))
        tiles = [resize(picture, side, side, self._resample)]
        tiles += [
            padded.crop((left, top, left + side, top + side))
            for top in range(0, grid[0], side)
            for left in range(0, grid[1], side)
        ]
        pixels = np.stack([np.asarray(tile) for tile in tiles])
        return Cut([Piece(pixels, [self._count(height, width, grid)], (height, width))], self.mark)

    def _choose(self, height: int, width: int) -> tuple[int, int]:
        """The grid that keeps most of the picture, then wastes least."""

        def rate(grid: tuple[int, int]) -> tuple[int, int]:
            scale = min(grid[1] / width, grid[0] / height)
            kept = min(int(width * scale) * int(height * scale), width * height)
            return kept, kept - grid[0] * grid[1]

        return max(self._grids, key=rate)

    def _count(self, height: int, width: int, grid: tuple[int, int]) -> int:
        """The whole, the tiles' vectors that are no padding, and one behind every row of those."""
        across = self._across
        rows, columns = across * (grid[0] // self._side), across * (grid[1] // self._side)
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        ratio = math.sqrt(rows * columns / (self._most * across**2))
        if ratio > 1.1:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return across**2 + rows * columns + rows


def fit_inside(height: int, width: int, grid: tuple[int, int]) -> tuple[int, int]:
    across, down = grid[1] / width, grid[0] / height
    if across < down:
        return min(math.ceil(height * across), grid[0]), grid[1]
    return grid[0], min(math.ceil(width * down), grid[1])


class PatchCutter(Cutter):
    """The picture at its own size, rounded to whole patches within bounds (Qwen2.5-VL, Qwen3-VL)."""

    def __init__(
        self,
        config: Mapping[str, Any],
        clips: Mapping[str, Any],
        mark: str,
        clip_mark: str,
        *,
        timed: bool,
        speed: float,
    ) -> None:
        """`clips` is the processor of video. `timed`: steps of a clip stand apart, with times between (Qwen3-VL);
        otherwise `speed` positions pass in a second."""
        self.mark = mark
        self.clip_mark = clip_mark
        self.unit: int = config.get("patch_size", 14) * config.get("merge_size", 2)
        self._resample = resample_of(config, Image.Resampling.BICUBIC)
        self._frames: int = config.get("temporal_patch_size", 2)
        self._bounds = read_bounds(config, (56 * 56, 28 * 28 * 1280))
        self._clip_bounds = read_bounds(clips, (128 * 32 * 32, 32 * 32 * 768))
        self._timed = timed
        self._speed = speed

    def cut(self, picture: Image.Image, detail: str, *, alone: bool) -> Cut:
        picture = limit(picture, detail)
        height, width = self._round(picture.height, picture.width, 1, self._bounds)
        rows, columns = height // self.unit, width // self.unit
        pixels = as_tile(resize(picture, height, width, self._resample))
        return Cut([Piece(pixels, [rows * columns], grid=(1, rows, columns))], self.mark)

    def cut_clip(self, frames: Sequence[Image.Image], seconds: Sequence[float]) -> Cut:
        spare = -len(frames) % self._frames
        frames, seconds = [*frames, *[frames[-1]] * spare], [*seconds, *[seconds[-1]] * spare]
        first, steps = frames[0], len(frames) // self._frames
        height, width = self._round(first.height, first.width, len(frames), self._clip_bounds)
        rows, columns = height // self.unit, width // self.unit
        pixels = np.stack([np.asarray(resize(frame, height, width, self._resample)) for frame in frames])
        times = [(seconds[i] + seconds[i + self._frames - 1]) / 2 for i in range(0, len(frames), self._frames)]
        grid = (steps, rows, columns)
        if self._timed:
            told = "".join(f"<{time:.1f} seconds><|vision_start|>{self.clip_mark}<|vision_end|>" for time in times)
            return Cut([Piece(pixels, [rows * columns] * steps, grid=grid)], told)
        interval = self._speed * ((times[-1] - times[0]) / (steps - 1) if steps > 1 else 1.0)
        return Cut([Piece(pixels, [steps * rows * columns], grid=grid, interval=interval)], str(self.clip_mark))

    def _round(self, height: int, width: int, frames: int, bounds: tuple[int, int]) -> tuple[int, int]:
        """Sides in whole units whose area times the frames is within the bounds, of about the same ratio."""
        unit, (least, most) = self.unit, bounds
        if max(height, width) > FLATTEST * min(height, width):
            raise InvalidRequest(f"One side of a picture may be {FLATTEST} times the other at most.", param="messages")
        tall, wide = (round(side / unit) * unit for side in (height, width))
        if frames * tall * wide > most:
            scale = math.sqrt(frames * height * width / most)
            return tuple(max(unit, math.floor(side / scale / unit) * unit) for side in (height, width))  # type: ignore[return-value]
        if frames * tall * wide < least:
            scale = math.sqrt(least / (frames * height * width))
            return tuple(math.ceil(side * scale / unit) * unit for side in (height, width))  # type: ignore[return-value]
        return tall, wide


def read_bounds(config: Mapping[str, Any], default: tuple[int, int]) -> tuple[int, int]:
    """Least and most pixels."""
    size = config.get("size") or {}
    least = config.get("min_pixels") or size.get("shortest_edge") or size.get("min_pixels") or default[0]
    most = config.get("max_pixels") or size.get("longest_edge") or size.get("max_pixels") or default[1]
    return least, most
