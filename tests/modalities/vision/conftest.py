"""Tiny vision models as folders, whole: weights, tokenizer, template and processor, served and reached by HTTP."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from tokenizers import AddedToken
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

from polymux.core.compute.device import LaggedCpu
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import ModelFiles
from polymux.core.service import Served, Service
from polymux.core.testing import tokenizers
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.tiny import build, tiny_llava, tiny_qwen3vl, tiny_smolvlm
from polymux.gateway.app import create_app
from polymux.gateway.settings import GatewaySettings
from polymux.modalities.vision.plugin import pipelines

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }} {% for part in m.content or [] %}"
    "{% if part.type == 'image' %}PICTURE{% elif part.type == 'video' %}CLIP{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}<|im_end|>{% endfor %}<|im_start|>assistant "
)
QWEN_MARKS = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SCALE = {"image_mean": [0.5, 0.4, 0.6], "image_std": [0.2, 0.3, 0.25]}

CHATS: dict[str, dict[str, Any]] = {
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


def write_folder(folder: Path, model: Any, backend: Any, processor: dict[str, Any], template: str | None) -> None:
    model.save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    (folder / "preprocessor_config.json").write_text(json.dumps({**processor, **SCALE}))
    (folder / "video_preprocessor_config.json").write_text(json.dumps({**processor, **SCALE}))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)


def write_chat(folder: Path, kind: str) -> None:
    wanted = CHATS[kind]
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
    write_folder(folder, model, backend, wanted["processor"], template)


def write_embedder(folder: Path, kind: str) -> None:
    backend = tokenizers.byte_level()
    layers = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    eos = backend.token_to_id("<|im_end|>")
    ids = {"pad_token_id": eos, "bos_token_id": eos, "eos_token_id": eos}
    text = layers | ids | {"vocab_size": backend.get_vocab_size(), "max_position_embeddings": 40}
    vision = layers | {"image_size": 16, "patch_size": 4}
    if kind == "clip":
        model = build(lambda: CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=24)))
    else:
        wide = text | {"projection_size": 32}
        model = build(lambda: SiglipModel(SiglipConfig(text_config=wide, vision_config=vision)))
    processor = {"size": {"height": 16, "width": 16}, "resample": 3}
    write_folder(folder, model, backend, processor, None)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders("qwen3-vl")`: made once."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            (write_chat if kind in CHATS else write_embedder)(made[kind], kind)
        return made[kind]

    return find


@pytest.fixture
def serve(folders: Callable[[str], Path]) -> Any:
    """`async with serve("qwen3-vl") as http:` the model behind a gateway, under that name."""

    @asynccontextmanager
    async def serving(*kinds: str, library: Any = httpx, **settings: Any) -> AsyncIterator[Any]:
        site = Site(LaggedCpu(), SiteSettings(cache_bytes=1 << 24, superpage=1 << 16, block=8, max_units=64))
        models = []
        programs = {}
        for kind in kinds:
            files = ModelFiles(kind, folders(kind))
            pipeline = next(each for each in pipelines() if each.accepts(files))
            programs[kind] = pipeline.load(files, site, {})
            models.append((kind, pipeline.tasks, pipeline.front(files, {})))
        engine = LocalEngine(programs, site)
        service = Service([Served(name, tasks, front, engine) for name, tasks, front in models])
        await service.start()
        await service.wait_ready()
        transport = library.ASGITransport(create_app(service, GatewaySettings(**settings)))
        try:
            async with library.AsyncClient(transport=transport, base_url="http://tiny") as client:
                yield client
        finally:
            await service.stop()

    return serving


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


def draw_picture(seed: int = 0, width: int = 40, height: int = 24) -> Image.Image:
    generator = np.random.default_rng(seed)
    return Image.fromarray(generator.integers(0, 256, (height, width, 3), np.uint8))


def write_uri(picture: Image.Image, format: str = "png", **options: Any) -> str:
    file = io.BytesIO()
    picture.save(file, format, **options)
    return f"data:image/{format};base64,{base64.b64encode(file.getvalue()).decode()}"


@pytest.fixture
def draw() -> Callable[..., Image.Image]:
    return draw_picture


@pytest.fixture
def uri() -> Callable[..., str]:
    return write_uri
