"""Tiny models that see, as folders with random weights: weights, tokenizer, template and processor."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from polymux.core.testing import tokenizers
from polymux.core.testing.tiny import build, tiny_llava, tiny_qwen3vl, tiny_smolvlm

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% for part in m.content or [] %}"
    "{% if part.type == 'image' %}PICTURE{% elif part.type == 'video' %}CLIP{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant "
)
QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SCALE = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.2, 0.3, 0.25]}

SEERS: dict[str, dict[str, Any]] = {
    "qwen3-vl": {
        "make": tiny_qwen3vl,
        "marks": QWEN_MARKS,
        "picture": "<|vision_start|><|image_pad|><|vision_end|>",
        "clip": "<|vision_start|><|video_pad|><|vision_end|>",
        "processor": {"patch_size": 4, "merge_size": 2, "size": {"shortest_edge": 256, "longest_edge": 4096}},
    },
    "smolvlm": {
        "make": tiny_smolvlm,
        "marks": ["<fake_token_around_image>", "<image>", "<global-img>", "<row_1_col_1>", "<row_1_col_2>"],
        "picture": "<image>",
        "processor": {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}},
    },
    "llava": {
        "make": tiny_llava,
        "marks": ["<image>"],
        "picture": "<image>",
        "processor": {
            "size": {"shortest_edge": 16},
            "crop_size": {"height": 16, "width": 16},
            "do_center_crop": True,
        },
    },
}


def _write(folder: Path, model: Any, backend: Any, processor: dict[str, Any], template: str | None) -> None:
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **SCALE}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**processor, **SCALE}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def write_seer(folder: Path, kind: str) -> None:
    """A model that chats about pictures: one of `SEERS`."""
    wanted = SEERS[kind]
    backend = tokenizers.byte_level()
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in wanted["marks"]])
    mark = "<image>" if "<image>" in wanted["marks"] else "<|image_pad|>"
    config = wanted["make"]().config
    config.text_config.vocab_size = backend.get_vocab_size()
    config.text_config.max_position_embeddings = 1024
    for name, token in (("image_token", mark), ("video_token", "<|video_pad|>")):
        for key in (f"{name}_id", f"{name}_index"):
            if hasattr(config, key) and backend.token_to_id(token) is not None:
                setattr(config, key, backend.token_to_id(token))
    model = build(lambda: type(wanted["make"]())(config), seed=3)
    template = TEMPLATE.replace("PICTURE", wanted["picture"]).replace("CLIP", wanted.get("clip", ""))
    _write(folder, model, backend, wanted["processor"], template)


def write_shower(folder: Path, kind: str) -> None:
    """A model that embeds pictures and texts: `clip` or `siglip`."""
    backend = tokenizers.byte_level()
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    eos = backend.token_to_id("<|im_end|>")
    ids = {"pad_token_id": eos, "bos_token_id": eos, "eos_token_id": eos}
    text = layers | ids | {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 40}
    vision = layers | {"image_size": 16, "patch_size": 4}
    model: Any
    if kind == "clip":
        model = build(lambda: CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))
    else:
        wide = text | {"projection_size": 32}
        model = build(lambda: SiglipModel(SiglipConfig(text_config=wide, vision_config=vision)))
    processor = {"size": {"height": 16, "width": 16}, "resample": 3}
    _write(folder, model, backend, processor, None)
