"""The judges of pictures and clips ask no model, and are right about what the data's own rules draw."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import presets
import pytest
import torch
import wording
from film import Film
from paint import Paint
from pictures import Easel
from scenes import MOTIONS, STILL, Scene, Thing, list_scenes
from things import see
from tracks import find_film_faults, find_motion, follow
from verdicts import find_faults

RED_LEFT = Scene("one", (Thing("circle", "red", "small"),), "left")


def to_bytes(drawn: torch.Tensor) -> np.ndarray:
    """(..., 3, side, side) from 0 to 1 as (..., side, side, 3) uint8."""
    return (drawn * 255).round().byte().movedim(-3, -1).numpy()


def draw(scenes: list[Scene], seed: int = 3) -> np.ndarray:
    easel, generator = Easel(scenes, 64), torch.Generator().manual_seed(seed)
    return to_bytes(easel.draw(easel.lay(torch.arange(len(scenes)), generator)))


def choose(count: int) -> list[Scene]:
    """Of every family as often."""
    chosen = []
    for family in STILL:
        kept = list_scenes((family,), held_out=True)
        chosen += kept[:: max(1, len(kept) * len(STILL) // count)][: count // len(STILL)]
    return chosen


@pytest.mark.parametrize("count", [50, pytest.param(800, marks=pytest.mark.slow)])
def test_drawn_pictures_are_right_and_other_scenes_are_not(count: int) -> None:
    scenes = choose(count)
    pictures = draw(scenes)
    faults = [find_faults(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
    assert sum(map(bool, faults)) <= 0.005 * len(scenes), [each for each in zip(scenes, faults) if each[1]][:5]
    for picture, scene, other in zip(pictures, scenes, [*scenes[1:], scenes[0]], strict=True):
        assert find_faults(picture, other), (scene.caption, other.caption)


@pytest.mark.parametrize(
    ("scene", "fault"),
    [
        (Scene("one", (Thing("circle", "blue", "small"),), "left"), "colour"),
        (Scene("one", (Thing("square", "red", "small"),), "left"), "kind"),
        (Scene("one", (Thing("circle", "red", "large"),), "left"), "size"),
        (Scene("one", (Thing("circle", "red", "small"),), "top"), "place"),
        (Scene("count", (Thing("circle", "red"),) * 2), "count"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.caption,
)
def test_a_fault_is_named(scene: Scene, fault: str) -> None:
    [picture] = draw([RED_LEFT])
    assert find_faults(picture, scene) == [fault]


def test_what_shows_nothing_or_noise_is_wrong() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for picture in (np.zeros((64, 64, 3), np.uint8), np.full((64, 64, 3), 240, np.uint8), noise):
        assert find_faults(picture, RED_LEFT)


def test_a_thing_is_measured_where_it_is() -> None:
    [picture] = draw([RED_LEFT])
    [thing] = see(picture)
    assert (thing.kind, thing.colour) == ("circle", "red")
    assert abs(thing.x + 0.5) < 0.1 and abs(thing.y) < 0.1
    assert 0.15 < thing.radius < 0.24 and thing.alike > 0.9


def test_motions_are_followed() -> None:
    """Each motion of a shape that turns, and none of a clip that stands still or runs backwards."""
    scenes = [Scene("film", (Thing("triangle", "green"),), motion) for motion in MOTIONS]
    easel, generator = Easel(scenes, 48), torch.Generator().manual_seed(0)
    clips = to_bytes(easel.draw_films(torch.arange(len(scenes)), 13, generator))
    for clip, scene in zip(clips, scenes, strict=True):
        assert find_film_faults(clip, scene) == []
        assert find_motion(clip[::-2], follow(clip[::-2]), "triangle") != scene.how
    assert find_film_faults(np.repeat(clips[0, :1], 5, 0), scenes[0]) == ["motion"]
    assert find_film_faults(clips[0], Scene("film", (Thing("star", "red"),), "left")) == ["kind", "colour"]


@pytest.mark.parametrize("course", [Paint(), Film()], ids=lambda course: course.name)
def test_every_wording_is_spelled_whole(course: Paint | Film) -> None:
    families = tuple(course.families)
    tokenizer = wording.build_tokenizer(wording.list_texts(list_scenes(families, held_out=False)), course.length)
    ids = wording.spell_scenes(list_scenes(families, held_out=True)[::17], tokenizer).flatten(0, 1)
    assert ids.shape[1] == course.length
    assert not (ids == tokenizer.unk_token_id).any()
    assert (ids == tokenizer.eos_token_id).sum(1).eq(1).all()
    assert tokenizer("A zebra, a red star")["input_ids"].count(tokenizer.unk_token_id) == 1


def test_likeness_has_its_known_values() -> None:
    some = np.random.default_rng(0).integers(0, 246, (16, 16, 3), dtype=np.uint8)
    assert presets.measure_psnr(some, some) is None
    assert presets.measure_psnr(some, some + 10) == pytest.approx(10 * np.log10(255**2 / 100))
    assert presets.measure_ssim(some, some) == pytest.approx(1)
    assert presets.measure_ssim(some, 255 - some) < 0.1


def test_cards_say_what_they_owe() -> None:
    for name in ("paint", "film"):
        card = (Path(wording.__file__).parent / "cards" / f"{name}.md").read_text()
        assert "TRAINING" in card
        for section in ("## Data", "## Recipe", "## Use", "## Evaluation", "## Limits"):
            assert section in card
