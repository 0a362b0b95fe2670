"""The outlines of all kinds of things, as fields of distances: negative inside, in radii of the thing."""

from __future__ import annotations

from math import cos, pi, sin

import numpy as np
from scenes import DIGITS, KINDS, SHAPES

FIELD_CELLS = 96
FIELD_REACH = 1.25
"""A field covers so many radii to each side."""

GLYPHS = {
    "0": "01110 10001 10011 10101 11001 10001 01110",
    "1": "00100 01100 00100 00100 00100 00100 01110",
    "2": "01110 10001 00001 00110 01000 10000 11111",
    "3": "11110 00001 00001 01110 00001 00001 11110",
    "4": "00010 00110 01010 10010 11111 00010 00010",
    "5": "11111 10000 11110 00001 00001 10001 01110",
    "6": "01110 10000 10000 11110 10001 10001 01110",
    "7": "11111 00001 00010 00100 01000 01000 01000",
    "8": "01110 10001 10001 01110 10001 10001 01110",
    "9": "01110 10001 10001 01111 00001 00001 01110",
    "A": "01110 10001 10001 11111 10001 10001 10001",
    "B": "11110 10001 10001 11110 10001 10001 11110",
    "C": "01110 10001 10000 10000 10000 10001 01110",
    "D": "11110 10001 10001 10001 10001 10001 11110",
    "E": "11111 10000 10000 11110 10000 10000 11111",
    "F": "11111 10000 10000 11110 10000 10000 10000",
    "G": "01110 10001 10000 10111 10001 10001 01110",
    "H": "10001 10001 10001 11111 10001 10001 10001",
    "K": "10001 10010 10100 11000 10100 10010 10001",
    "N": "10001 11001 10101 10011 10001 10001 10001",
    "O": "01110 10001 10001 10001 10001 10001 01110",
    "P": "11110 10001 10001 11110 10000 10000 10000",
    "R": "11110 10001 10001 11110 10100 10010 10001",
    "S": "01111 10000 10000 01110 00001 00001 11110",
    "T": "11111 00100 00100 00100 00100 00100 00100",
    "U": "10001 10001 10001 10001 10001 10001 01110",
    "X": "10001 01010 00100 00100 00100 01010 10001",
    "Y": "10001 01010 00100 00100 00100 00100 00100",
}
"""Five columns of seven rows."""


def draw_fields() -> np.ndarray:
    """(KINDS, cells, cells) float32, in their order."""
    return np.stack([draw_shape(kind) if kind in SHAPES else draw_text(kind) for kind in KINDS]).astype(np.float32)


def make_grid() -> np.ndarray:
    """(cells, cells, 2) of x and y at the middle of each cell."""
    line = ((np.arange(FIELD_CELLS) + 0.5) * 2 / FIELD_CELLS - 1) * FIELD_REACH
    return np.stack(np.meshgrid(line, line), -1)


def draw_shape(shape: str) -> np.ndarray:
    away = np.linalg.norm(make_grid(), axis=-1)
    if shape == "circle":
        return away - 0.9
    if shape == "ring":
        return np.abs(away - 0.7) - 0.22
    return measure_polygon(make_grid(), list_corners(shape))


def list_corners(shape: str) -> list[tuple[float, float]]:
    if shape == "square":
        return [(-0.8, -0.8), (0.8, -0.8), (0.8, 0.8), (-0.8, 0.8)]
    if shape == "triangle":
        return [(0, -0.95), (0.95, 0.75), (-0.95, 0.75)]
    if shape == "star":
        lengths = (1.0, 0.42)
        return [(lengths[i % 2] * sin(pi * i / 5), -lengths[i % 2] * cos(pi * i / 5)) for i in range(10)]
    thin, long = 0.28, 0.92
    quarter = [(thin, -long), (thin, -thin), (long, -thin)]
    corners = []
    for _ in range(4):
        corners += quarter
        quarter = [(-y, x) for x, y in quarter]
    return corners


def measure_polygon(points: np.ndarray, corners: list[tuple[float, float]]) -> np.ndarray:
    """The distance of points, (..., 2), to a polygon's outline, negative inside."""
    least = np.full(points.shape[:-1], np.inf)
    inside = np.zeros(points.shape[:-1], bool)
    for (ax, ay), (bx, by) in zip(corners, [*corners[1:], corners[0]], strict=True):
        edge, there = np.array([bx - ax, by - ay]), points - np.array([ax, ay])
        along = np.clip(there @ edge / (edge @ edge), 0, 1)
        least = np.minimum(least, np.linalg.norm(there - along[..., None] * edge, axis=-1))
        crosses = (ay > points[..., 1]) != (by > points[..., 1])
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = (bx - ax) * (points[..., 1] - ay) / (by - ay) + ax
        inside ^= crosses & (points[..., 0] < crossing)
    return np.where(inside, -least, least)


def draw_text(text: str) -> np.ndarray:
    """A digit fills the height of its field, a word the width."""
    rows = [glyph.split() for glyph in (GLYPHS[letter] for letter in text)]
    dots = np.array([[dot == "1" for dot in "0".join(letter[row] for letter in rows)] for row in range(7)])
    height, width = dots.shape
    step = 2 / height if text in DIGITS else 2 / width
    points = make_grid()
    least = np.full(points.shape[:-1], np.inf)
    for row, column in np.argwhere(dots):
        for tall, wide in ((1, 1), (2, 1), (1, 2)):  # two neighbours are one box, so that no seam shows
            if not dots[row : row + tall, column : column + wide].all() or row + tall > height or column + wide > width:
                continue
            middle = np.array([column + wide / 2 - width / 2, row + tall / 2 - height / 2]) * step
            beyond = np.abs(points - middle) - np.array([wide, tall]) * step / 2
            outside = np.linalg.norm(np.maximum(beyond, 0), axis=-1)
            least = np.minimum(least, outside + np.minimum(beyond.max(-1), 0))
    return least
