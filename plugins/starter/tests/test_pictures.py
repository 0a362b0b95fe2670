"""What the starters are trained on is drawn as it is told: pictures show their scenes' facts, whatever else differs."""

from __future__ import annotations

import pytest
import torch
from pictures import Easel
from scenes import COLOURS, FAMILIES, KINDS, MOTIONS, Scene, Thing, list_scenes

EVERY = tuple(FAMILIES)


def draw(scenes: list[Scene], side: int = 64, seed: int = 0) -> torch.Tensor:
    easel, generator = Easel(scenes, side), torch.Generator().manual_seed(seed)
    return easel.draw(easel.lay(torch.arange(len(scenes)), generator))


def find_ink(picture: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Which pixels are not the ground, and the mean colour of those, of 255."""
    ink = (picture - picture[:, :1, :1]).abs().amax(0) > 0.3
    return ink, picture[:, ink].median(1).values * 255


def test_captions_name_one_scene_each_and_a_fifth_is_held_out() -> None:
    seen, kept = list_scenes(EVERY, held_out=False), list_scenes(EVERY, held_out=True)
    captions = {scene.caption for scene in (*seen, *kept)}
    assert len(captions) == len(seen) + len(kept)
    assert 0.15 < len(kept) / len(captions) < 0.25
    for family in FAMILIES:
        assert any(scene.family == family for scene in kept)


def test_one_seed_draws_one_picture() -> None:
    scenes = list_scenes(("count",), held_out=True)[:8]
    assert torch.equal(draw(scenes), draw(scenes))
    assert not torch.equal(draw(scenes), draw(scenes, seed=1))


@pytest.mark.parametrize("side", [32, 64, 100])
def test_a_thing_has_its_colour_and_stands_in_its_place(side: int) -> None:
    scenes = [Scene("one", (Thing("circle", colour, "large"),), "left") for colour in COLOURS]
    for picture, told in zip(draw(scenes, side), COLOURS.values(), strict=True):
        ink, colour = find_ink(picture)
        assert (colour - torch.tensor(told)).abs().max() < 25
        assert ink.nonzero()[:, 1].float().mean() < side * 0.4


def test_a_pair_stands_as_it_is_told() -> None:
    pairs = [
        Scene("pair", (Thing("square", "black", "large"), Thing("circle", "red", "small")), how)
        for how in ("left", "above") * 20
    ]
    for picture, pair in zip(draw(pairs), pairs, strict=True):
        black = (picture.amax(0) < 0.4).nonzero().float()
        red = ((picture[0] > 0.6) & (picture[1:].amax(0) < 0.4)).nonzero().float()
        axis = int(pair.how == "left")
        assert black[:, axis].mean() + 16 < red[:, axis].mean()
        assert len(black) > 2 * len(red)


def test_as_many_things_as_are_told_and_none_touches_another() -> None:
    scenes = [Scene("count", (Thing("square", "black"),) * count) for count in (2, 3, 4, 5) for _ in range(10)]
    for picture, scene in zip(draw(scenes), scenes, strict=True):
        assert count_islands(picture.amax(0) < 0.5) == len(scene.things)


def count_islands(ink: torch.Tensor) -> int:
    left, islands = {tuple(each) for each in ink.nonzero().tolist()}, 0
    while left:
        islands, edge = islands + 1, [left.pop()]
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
    return islands


def test_every_kind_looks_different_and_stays_inside() -> None:
    scenes = [scene for scene in list_scenes(held_out=False) if scene.family in ("one", "digit", "word")]
    for picture in draw(scenes):
        edge = torch.cat([picture[:, 0], picture[:, -1], picture[:, :, 0], picture[:, :, -1]], 1)
        assert (edge - edge[:, :1]).abs().max() < 0.05
    easel = Easel([Scene("digit", (Thing(kind, "black"),)) for kind in KINDS], 64)
    layout = easel.lay(torch.arange(len(KINDS)), torch.Generator().manual_seed(0))
    layout.x, layout.y, layout.radius = (torch.full_like(layout.x, to) for to in (0.0, 0.0, 0.8))
    pictures = easel.draw(layout).flatten(1)
    apart = torch.cdist(pictures, pictures) + torch.eye(len(KINDS)) * 100
    assert apart.min() > 5


def test_marks_say_what_is_where() -> None:
    scenes = [Scene("pair", (Thing("star", "cyan", "large"), Thing("ring", "red", "small")), "left")]
    easel = Easel(scenes, 64)
    layout = easel.lay(torch.tensor([0]), torch.Generator().manual_seed(0))
    kind, colour = easel.mark(layout, 8)
    star, ring = kind[0] == KINDS.index("star"), kind[0] == KINDS.index("ring")
    assert star[:, :4].any() and not star[:, 4:].any() and ring[:, 4:].any() and not ring[:, :4].any()
    assert (colour[0][star] == list(COLOURS).index("cyan")).all()
    assert (kind == len(KINDS)).sum() > 30


@pytest.mark.parametrize("motion", MOTIONS)
def test_a_film_moves_as_it_is_told(motion: str) -> None:
    easel = Easel([Scene("film", (Thing("triangle", "black"),), motion)], 48)
    film = easel.draw_films(torch.tensor([0]), 6, torch.Generator().manual_seed(0))[0]
    assert film.shape == (6, 3, 48, 48)
    ink = [(frame.amax(0) < 0.5) for frame in film]
    middles = torch.stack([each.nonzero().float().mean(0) for each in ink])
    sizes = torch.tensor([float(each.sum()) for each in ink])
    down, right = ((middles[1:] - middles[:-1]).mean(0) / 48).tolist()
    if motion in ("left", "right"):
        assert (right > 0.05) is (motion == "right") and abs(right) > 0.05 and abs(down) < 0.01
    elif motion in ("up", "down"):
        assert (down > 0.05) is (motion == "down") and abs(down) > 0.05 and abs(right) < 0.01
    elif motion in ("growing", "shrinking"):
        assert (sizes.diff() > 0).all() if motion == "growing" else (sizes.diff() < 0).all()
    else:
        tips = [each.nonzero().float()[0, 1] for each in ink[:4]]
        assert (tips[-1] > tips[0]) == (motion == "clockwise") and abs(tips[-1] - tips[0]) > 1
