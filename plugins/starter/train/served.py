"""Reaches a model as any client does: on a server, or from its folder through polymux's own gateway in this process."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from PIL import Image
from torch import Tensor

TIMEOUT = 600.0


@dataclass(frozen=True)
class Reached:
    """A model behind `/v1` of `http`."""

    http: httpx.AsyncClient
    model: str

    async def post(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of `/v1/ROUTE`. Raises `RuntimeError` with what the server said when it refuses."""
        answer = await self.http.post(f"/v1/{route}", json={"model": self.model, **body})
        if answer.is_error:
            raise RuntimeError(f"{route}: {answer.status_code} {answer.text}")
        told: dict[str, Any] = answer.json()
        return told


@asynccontextmanager
async def reach(where: str, model: str, options: Mapping[str, Any] | None = None) -> AsyncIterator[Reached]:
    """`where`: the address of a server that serves `model`, or the model's folder, then served with `options`."""
    if where.startswith("http"):
        async with httpx.AsyncClient(base_url=where, timeout=TIMEOUT) as http:
            yield Reached(http, model)
        return
    from polymux.core.plugins import load_plugins
    from polymux.core.testing.local import LocalModel, open_local
    from polymux.gateway.testing import open_gateway

    plugins = load_plugins()
    local = LocalModel(model, Path(where), options={"dtype": "float32", **(options or {})})
    async with open_gateway(open_local(plugins, [local]), plugins) as http:
        http.timeout = TIMEOUT
        yield Reached(http, model)


def write_url(picture: Tensor) -> str:
    """(3, height, width) from 0 to 1 as the data URI of a PNG."""
    file = io.BytesIO()
    Image.fromarray((picture * 255).round().byte().permute(1, 2, 0).numpy()).save(file, "png")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


def is_small(where: str) -> bool:
    """Whether a folder's model was trained with `--small`, so that it knows few scenes."""
    told = Path(where) / "training.json"
    return told.is_file() and bool(json.loads(told.read_text())["small"])
