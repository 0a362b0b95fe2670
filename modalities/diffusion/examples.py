"""Tiny models that paint and film, with random weights, and what to ask them, for `polymux plugin check`."""

from __future__ import annotations

from pathlib import Path

from polymux.core.plugins import Example
from polymux.core.tasks import Film, Paint
from polymux.core.testing.media import write_picture
from polymux.core.testing.painting import save_tiny_flux
from polymux.core.testing.pipelines import save_tiny

ROUNDING = 0.02
"""Of the largest value of a pixel: two launches may round to neighbours."""


def write_painter(folder: Path) -> None:
    save_tiny_flux(folder)


def write_filmer(folder: Path) -> None:
    save_tiny("wan", folder)


def make_examples() -> list[Example]:
    fox = "The quick brown fox"
    return [
        Example(
            pipeline="painting",
            make=write_painter,
            asks={
                "image": [
                    Paint(prompt=fox, width=32, height=32, steps=2, seed=3, n=2, previews=1),
                    Paint(
                        prompt="the end",
                        width=32,
                        height=16,
                        steps=3,
                        seed=4,
                        negative="dog",
                        true_scale=2.0,
                        source=write_picture(32, 16),
                        strength=0.7,
                    ),
                ]
            },
            refused={
                "image": [
                    Paint(prompt=fox, width=33, height=32),
                    Paint(prompt=fox, steps=0),
                    Paint(prompt=fox, source=b"no picture"),
                ]
            },
            tolerance=ROUNDING,
        ),
        Example(
            pipeline="filming",
            make=write_filmer,
            asks={
                "video": [
                    Film(prompt=fox, width=32, height=16, steps=2, seed=5, frames=5),
                    Film(prompt="the lazy dog", width=16, height=32, steps=3, seed=6, frames=1, negative="fox"),
                ]
            },
            refused={
                "video": [Film(prompt=fox, frames=4), Film(prompt=fox, width=32, height=16, source=write_picture())]
            },
            tolerance=ROUNDING,
        ),
    ]
