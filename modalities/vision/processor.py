"""A model's processor, read from its small files: how pictures are cut, and what stands for them in a prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from polymux.core.errors import ModelError
from polymux.modalities.vision.cut import AnyresCutter, Cutter, PatchCutter, SplitCutter, TileCutter

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles
    from polymux.core.text.tokenizer import Tokenizer

SEEING = ("qwen2_5_vl", "qwen3_vl", "idefics3", "smolvlm", "llava", "llava_onevision")
"""Types of model whose pictures and prompts are known here."""


def read_processor(files: ModelFiles, part: str = "image_processor") -> dict[str, Any]:
    """The configuration of one processor, from whichever file has it; empty when none does."""
    name = {"image_processor": "preprocessor_config.json", "video_processor": "video_preprocessor_config.json"}[part]
    return files.json(name) or dict(files.json("processor_config.json").get(part) or {})


def find_mark(config: dict[str, Any], tokenizer: Tokenizer, kind: str) -> str:
    """What stands for a picture ("image") or a clip ("video") in the model's prompts."""
    id = config.get(f"{kind}_token_id", config.get(f"{kind}_token_index"))
    name = tokenizer.name(id) if isinstance(id, int) else ""
    if not name:
        raise ModelError(f"config.json does not say which token holds the place of an {kind}")
    return name


def make_cutter(files: ModelFiles, tokenizer: Tokenizer) -> Cutter:
    """Raises `ModelError` when a file does not say enough."""
    config = files.config()
    kind, vision = str(config.get("model_type")), dict(config.get("vision_config") or {})
    processor, mark = read_processor(files), find_mark(config, tokenizer, "image")
    if kind in ("qwen2_5_vl", "qwen3_vl"):
        return PatchCutter(
            {**{key: vision[key] for key in ("patch_size", "temporal_patch_size") if key in vision}, **processor},
            read_processor(files, "video_processor"),
            mark,
            find_mark(config, tokenizer, "video"),
            timed=kind == "qwen3_vl",
            speed=float(vision.get("tokens_per_second", 2)),
        )
    try:
        across = vision["image_size"] // vision["patch_size"]
    except KeyError as error:
        raise ModelError(f"{files.reference}: config.json does not say the {error} of its pictures") from error
    if kind in ("idefics3", "smolvlm"):
        return SplitCutter(processor, mark, across**2 // config.get("scale_factor", 2) ** 2)
    if kind == "llava_onevision":
        return AnyresCutter(processor, config, mark, across)
    first = config.get("vision_feature_select_strategy", "default") != "default"
    classes = vision.get("model_type", "clip_vision_model") == "clip_vision_model"
    return TileCutter(processor, mark, across**2 + (classes and first))
