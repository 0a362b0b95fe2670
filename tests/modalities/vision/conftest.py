"""Tiny vision models as folders, whole, served and reached by HTTP."""

from __future__ import annotations

import base64
import io
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image

from polymux.core.compute.device import LaggedCpu
from polymux.core.engine.site import Site, SiteSettings
from polymux.core.models import ModelFiles
from polymux.core.service import Served, Service
from polymux.core.testing.engine import LocalEngine
from polymux.core.testing.seeing import SEERS, write_seer, write_shower
from polymux.gateway.app import create_app
from polymux.gateway.settings import GatewaySettings
from polymux.modalities.vision.plugin import pipelines


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`folders("qwen3-vl")`: made once."""
    made: dict[str, Path] = {}

    def find(kind: str) -> Path:
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            (write_seer if kind in SEERS else write_shower)(made[kind], kind)
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
