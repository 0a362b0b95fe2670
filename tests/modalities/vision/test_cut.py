"""Pictures are cut as transformers' own processors cut them, in their Pillow form."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from polymux.core.errors import InvalidRequest
from polymux.modalities.vision.cut import AnyresCutter, Cut, PatchCutter, SplitCutter, TileCutter

SIZES = [(40, 40), (97, 31), (30, 120), (64, 65), (8, 8), (200, 90)]
PLAIN = {"do_rescale": False, "do_normalize": False}


def draw(width: int, height: int) -> Image.Image:
    generator = np.random.default_rng(width * height)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))


def tiles(cut: Cut) -> np.ndarray:
    """(tiles, 3, height, width)."""
    return np.concatenate([piece.pixels for piece in cut.pieces]).transpose(0, 3, 1, 2)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", [Idefics3ImageProcessorPil, SmolVLMImageProcessorPil])
@pytest.mark.parametrize("splits", [True, False])
def test_split(kind: Any, size: tuple[int, int], splits: bool) -> None:
    config = {"size": {"longest_edge": 96}, "max_image_size": {"longest_edge": 32}, "do_image_splitting": splits}
    told = kind(**config, **PLAIN)(draw(*size), return_row_col_info=True)
    cut = SplitCutter(config, "<image>", 4).cut(draw(*size), "auto", alone=True)
    np.testing.assert_array_equal(tiles(cut), told["pixel_values"][0])
    rows, columns = told["rows"][0][0], told["cols"][0][0]
    assert cut.text.count("<image>") == len(cut.pieces) == rows * columns + 1
    assert (f"<row_{rows}_col_{columns}>" in cut.text) == (rows > 0)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("pads", [True, False])
def test_tile(size: tuple[int, int], pads: bool) -> None:
    config = {"size": {"shortest_edge": 24}, "crop_size": {"height": 24, "width": 24}, "do_center_crop": True}
    config |= {"do_pad": pads, "image_mean": [0.5, 0.4, 0.3]}
    told = LlavaImageProcessorPil(**config, **PLAIN)(draw(*size))
    cut = TileCutter(config, "<image>", 4).cut(draw(*size), "auto", alone=True)
    np.testing.assert_array_equal(tiles(cut), told["pixel_values"])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("alone", [True, False])
def test_anyres(size: tuple[int, int], alone: bool) -> None:
    """One picture in tiles; of several, each as a whole."""
    grids = [[height, width] for height in (16, 32, 48) for width in (16, 32, 48)]
    config = {"size": {"height": 16, "width": 16}, "image_grid_pinpoints": grids, "image_mean": [0.5, 0.4, 0.3]}
    processor = LlavaOnevisionImageProcessorPil(**config, **PLAIN)
    told = processor(draw(*size) if alone else [[draw(*size), draw(9, 9)]])
    cutter = AnyresCutter(config, {"vision_aspect_ratio": "anyres_max_4"}, "<image>", 4)
    cut = cutter.cut(draw(*size), "auto", alone=alone)
    np.testing.assert_array_equal(tiles(cut), told["pixel_values"][0][: len(tiles(cut))])
    assert len(tiles(cut)) == len(told["pixel_values"][0])


@pytest.mark.parametrize("size", SIZES)
def test_patches(size: tuple[int, int]) -> None:
    config = {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 512, "longest_edge": 4096}}
    told = Qwen2VLImageProcessorPil(**config, **PLAIN, temporal_patch_size=1)(draw(*size))
    cut = PatchCutter(config, {}, "<image>", "<video>", timed=True, speed=2.0).cut(draw(*size), "auto", alone=True)
    (piece,) = cut.pieces
    (grid,) = told["image_grid_thw"].tolist()
    assert [1, 2 * piece.grid[1], 2 * piece.grid[2]] == grid
    _, height, width, _ = piece.pixels.shape
    blocks = piece.pixels[0].reshape(height // 8, 2, 4, width // 8, 2, 4, 3).transpose(0, 3, 1, 4, 6, 2, 5)
    np.testing.assert_array_equal(blocks.reshape(-1, 48), told["pixel_values"])


def test_a_clip_of_steps_with_times_between() -> None:
    config = {"patch_size": 4, "merge_size": 2, "temporal_patch_size": 2}
    bounds = {"size": {"shortest_edge": 64, "longest_edge": 4096}}
    frames = [draw(16, 16)] * 5
    cutter = PatchCutter(config, bounds, "<image>", "<video>", timed=True, speed=2.0)
    cut = cutter.cut_clip(frames, [0.0, 0.5, 1.0, 1.5, 2.0])
    assert cut.text.count("<video>") == 3
    assert cut.text.startswith("<0.2 seconds><|vision_start|><video><|vision_end|><1.2 seconds>")
    (piece,) = cut.pieces
    assert piece.pixels.shape == (6, 16, 16, 3)
    assert piece.counts == [4, 4, 4]
    still = PatchCutter(config, bounds, "<image>", "<video>", timed=False, speed=2.0)
    (piece,) = still.cut_clip(frames, [0.0, 0.5, 1.0, 1.5, 2.0]).pieces
    assert piece.counts == [12]
    assert piece.interval == pytest.approx(2.0 * 0.875)


def test_low_detail_costs_less() -> None:
    config = {"patch_size": 16, "merge_size": 2, "size": {"shortest_edge": 1024, "longest_edge": 1 << 24}}
    cutter = PatchCutter(config, {}, "<image>", "<video>", timed=True, speed=2.0)
    counts = [cutter.cut(draw(1600, 900), detail, alone=True).pieces[0].counts[0] for detail in ("low", "high")]
    assert counts == [16 * 9, 50 * 28]


def test_a_picture_that_is_all_side_is_refused() -> None:
    cutter = PatchCutter({}, {}, "<image>", "<video>", timed=True, speed=2.0)
    with pytest.raises(InvalidRequest, match="200 times"):
        cutter.cut(draw(2000, 4), "auto", alone=True)
