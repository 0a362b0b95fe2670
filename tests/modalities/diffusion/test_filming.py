"""Videos: jobs by the official client, files of exactly what was asked for, and nothing left of what was cancelled."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import av
import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from polymux.core.errors import InvalidRequest
from polymux.core.testing.pipelines import save_tiny
from polymux.gateway.clips import encode_clip
from polymux.modalities.diffusion.plugin import Filming

pytestmark = pytest.mark.anyio

ASK: dict[str, Any] = {"model": "wan", "prompt": "The quick brown fox", "size": "32x16"}
STEPS = {"steps": 3, "seed": 4, "frames": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("wan")


@pytest.fixture(scope="module")
def peer(folder: Path) -> Any:
    return save_tiny("wan", folder)


@pytest.fixture(scope="module")
async def behind(serve: Any, folder: Path, peer: Any) -> AsyncIterator[Any]:
    """A gateway with what answers behind it."""
    async with serve(Filming(), {"wan": folder}) as behind:
        yield behind


@pytest.fixture(scope="module")
def http(behind: Any) -> httpx.AsyncClient:
    return behind.http  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(behind: Any) -> openai.AsyncOpenAI:
    return behind.client  # type: ignore[no-any-return]


async def wait(http: httpx.AsyncClient, id: str) -> dict[str, Any]:
    while True:
        body: dict[str, Any] = (await http.get(f"/v1/videos/{id}")).json()
        if body["status"] in ("completed", "failed"):
            return body
        await asyncio.sleep(0.02)


def read_mp4(data: bytes) -> tuple[np.ndarray, float]:
    with av.open(io.BytesIO(data)) as container:
        stream = container.streams.video[0]
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        return np.stack(frames), float(stream.average_rate or 0)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
async def test_a_clip_by_the_official_client(client, http, peer) -> None:
    """Created, asked about, fetched, listed, deleted; and it is the clip of diffusers."""
    job = await client.videos.create(**ASK, extra_body=STEPS)
    assert (job.object, job.model, job.size) == ("video", "wan", "32x16")
    done = await wait(http, job.id)
    assert (done["status"], done["progress"], done["frames"], done["fps"]) == ("completed", 100, 5, 16)
    content = await (await client.videos.download_content(job.id)).aread()
    assert content.index(b"moov") < content.index(b"mdat"), "the index comes first, so that it plays while it loads"
    frames, rate = read_mp4(content)
    assert frames.shape == (5, 16, 32, 3)
    assert rate == 16
    alone = peer(
        prompt=ASK["prompt"],
        negative_prompt="",
        width=32,
        height=16,
        num_frames=5,
        num_inference_steps=3,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(4),
        output_type="np",
    ).frames[0]
    assert np.abs(frames / 255 - alone).mean() < 0.05
    assert done["seed"] == 4
    thumbnail = await (await client.videos.download_content(job.id, variant="thumbnail")).aread()
    assert Image.open(io.BytesIO(thumbnail)).size == (32, 16)
    assert job.id in [each.id async for each in client.videos.list(limit=1)]
    assert (await client.videos.delete(job.id)).deleted
    with pytest.raises(openai.NotFoundError):
        await client.videos.retrieve(job.id)


@pytest.mark.parametrize("format", ["gif", "webp"])
async def test_moving_pictures(http, format) -> None:
    created = await http.post("/v1/videos", json={**ASK, **STEPS, "output_format": format, "fps": 10})
    done = await wait(http, created.json()["id"])
    assert done["status"] == "completed", done
    content = await http.get(f"/v1/videos/{done['id']}/content")
    assert content.headers["content-type"] == f"image/{format}"
    picture = Image.open(io.BytesIO(content.content))
    assert (picture.size, picture.n_frames) == ((32, 16), 5)
    lengths = []
    for place in range(5):
        picture.seek(place)
        picture.load()
        lengths.append(picture.info["duration"])
    assert sum(lengths) == 500
    part = await http.get(f"/v1/videos/{done['id']}/content", headers={"range": "bytes=0-9"})
    assert (part.status_code, len(part.content)) == (206, 10)


async def test_seconds_become_the_nearest_length(http) -> None:
    created = await http.post("/v1/videos", json={**ASK, "steps": 1, "seconds": "1"})
    body = created.json()
    assert (body["frames"], body["seconds"]) == (17, "1.062")
    await wait(http, body["id"])


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"frames": 6}, "frames", "multiple of 4"),
        ({"size": "33x16"}, "size", "even"),
        ({"size": "100000x10000"}, "size", "pixels"),
        ({"size": "40x16"}, "size", "multiples of 16"),
        ({"frames": 5, "seconds": "1"}, None, "seconds or frames"),
        ({"seconds": "1e3"}, "seconds", ""),
        ({"fps": 0}, "fps", ""),
        ({"output_format": "avi"}, "output_format", "mp4"),
        ({"prompt": ""}, "prompt", ""),
        ({"steps": 1000}, "steps", "200"),
        ({"model": "other"}, "model", "not served"),
    ],
)
async def test_refused_at_once(http, fields, param, said) -> None:
    answer = await http.post("/v1/videos", json={**ASK, **STEPS, **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) in ((400, param), (404, param))
    assert said in error["message"]


async def test_a_cancelled_clip_leaves_nothing(http, behind) -> None:
    """docker model-runner 1041, vllm-omni 3167: ghost work; and the clip beside it is made as if it were alone."""
    body = {**ASK, "steps": 150, "frames": 17}
    doomed = (await http.post("/v1/videos", json=body)).json()["id"]
    other = (await http.post("/v1/videos", json={**ASK, **STEPS})).json()["id"]
    early = await http.get(f"/v1/videos/{doomed}/content")
    assert (early.status_code, early.json()["error"]["code"]) == (400, "video_not_ready")
    cancelled = (await http.post(f"/v1/videos/{doomed}/cancel")).json()
    assert (cancelled["status"], cancelled["error"]["code"]) == ("failed", "cancelled")
    again = (await http.post(f"/v1/videos/{doomed}/cancel")).json()
    assert again["status"] == "failed"
    assert (await wait(http, other))["status"] == "completed"
    deleted = (await http.post("/v1/videos", json=body)).json()["id"]
    assert (await http.delete(f"/v1/videos/{deleted}")).json()["deleted"]
    assert (await http.get(f"/v1/videos/{deleted}")).status_code == 404
    await wait(http, (await http.post("/v1/videos", json={**ASK, **STEPS})).json()["id"])
    behind.check_integrity()


async def test_pages_of_jobs(http) -> None:
    ids = [(await http.post("/v1/videos", json={**ASK, "steps": 1, "frames": 1})).json()["id"] for _ in range(3)]
    for id in ids:
        await wait(http, id)
    first = (await http.get("/v1/videos", params={"limit": 2})).json()
    assert [each["id"] for each in first["data"]] == [ids[2], ids[1]]
    assert first["has_more"]
    later = (await http.get("/v1/videos", params={"limit": 1, "after": first["last_id"]})).json()
    assert later["data"][0]["id"] == ids[0]
    for query in ({"limit": "0"}, {"limit": "x"}, {"order": "up"}):
        assert (await http.get("/v1/videos", params=query)).status_code == 400


@pytest.mark.parametrize(("size", "count", "rate"), [((834, 482), 7, 24), ((16, 16), 1, 1), ((64, 48), 9, 30)])
def test_an_mp4_is_exactly_as_large_long_and_fast(size, count, rate) -> None:
    """ComfyUI-VHS 51: odd sizes failed, or were rescaled in silence."""
    frames = np.random.default_rng(0).integers(0, 255, (count, size[1], size[0], 3), np.uint8)
    shown, told = read_mp4(encode_clip(frames, rate, "mp4"))
    assert shown.shape == frames.shape
    assert told == rate
    with pytest.raises(InvalidRequest, match="even sides"):
        encode_clip(frames[:, : size[1] - 1], rate, "mp4")
