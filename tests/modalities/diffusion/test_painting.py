"""From a diffusers folder to a file, through the gateway, by the official client: what diffusers itself paints."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import torch
from diffusers import AutoencoderKL, FluxPipeline
from PIL import Image

from polymux.core.errors import InternalError
from polymux.core.testing.painting import save_tiny_flux
from polymux.modalities.diffusion.pixels import LatentDecoder
from polymux.modalities.diffusion.plugin import Painting
from polymux.modalities.diffusion.spelling import build_clip

pytestmark = pytest.mark.anyio

PROMPT = "The quick brown fox, for 12 dogs!"
ONE_LEVEL = 1 / 255 + 1e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("flux")


@pytest.fixture(scope="module")
def diffusers(folder: Path) -> FluxPipeline:
    return save_tiny_flux(folder)


@pytest.fixture(scope="module")
async def behind(serve: Any, folder: Path, diffusers: FluxPipeline) -> AsyncIterator[Any]:
    """A gateway with what answers behind it."""
    async with serve(Painting(), {"flux": folder}) as behind:
        yield behind


@pytest.fixture(scope="module")
def http(behind: Any) -> httpx.AsyncClient:
    return behind.http  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(behind: Any) -> openai.AsyncOpenAI:
    return behind.client  # type: ignore[no-any-return]


async def paint(client: openai.AsyncOpenAI, size: str = "32x24", **more: Any) -> list[np.ndarray]:
    extra = {"steps": 3, "seed": 7, **more.pop("extra", {})}
    answer = await client.images.generate(model="flux", prompt=PROMPT, size=size, extra_body=extra, **more)  # type: ignore[call-overload]
    return [read(image.b64_json) for image in answer.data]


def read(data: str, format: str = "PNG") -> np.ndarray:
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    assert image.format == format
    return np.asarray(image) / 255


def paint_alone(diffusers: FluxPipeline, seed: int, **more: Any) -> np.ndarray:
    options = {"width": 32, "height": 24, "num_inference_steps": 3, "guidance_scale": 3.5, **more}
    generator = torch.Generator().manual_seed(seed)
    picture: np.ndarray = diffusers(PROMPT, generator=generator, output_type="np", **options).images[0]
    return picture


async def test_it_is_the_picture_of_diffusers(client: openai.AsyncOpenAI, diffusers: FluxPipeline) -> None:
    """Prompt, size, steps, guidance, negative prompt and seed all arrive."""
    [plain] = await paint(client)
    np.testing.assert_allclose(plain, paint_alone(diffusers, 7), atol=ONE_LEVEL)
    extra = {"guidance": 7.0, "negative_prompt": "lazy", "true_cfg_scale": 2.5, "steps": 5}
    [guided] = await paint(client, "16x48", extra=extra)
    alone = paint_alone(
        diffusers,
        7,
        width=16,
        height=48,
        num_inference_steps=5,
        guidance_scale=7.0,
        negative_prompt="lazy",
        true_cfg_scale=2.5,
    )
    np.testing.assert_allclose(guided, alone, atol=ONE_LEVEL)


async def test_image_k_is_had_again_by_its_seed(client: openai.AsyncOpenAI) -> None:
    """easydiffusion 123: duplicates in n, and the k-th cannot be had again."""
    many = await paint(client, n=3)
    alone = [(await paint(client, extra={"seed": 7 + k}))[0] for k in range(3)]
    for picture, single in zip(many, alone):
        np.testing.assert_allclose(picture, single, atol=ONE_LEVEL)
    assert not np.allclose(many[0], many[1], atol=0.05)
    answer = await client.images.generate(model="flux", prompt=PROMPT, size="16x16", n=2, extra_body={"steps": 1})
    first, second = (image.model_extra["seed"] for image in answer.data)
    assert second == first + 1


async def test_many_at_once_are_as_alone(client: openai.AsyncOpenAI) -> None:
    """diffusers 7851, sglang 28502: parallel requests failed, or changed each other."""
    asks = [
        {"size": size, "extra": {"seed": seed, "steps": steps}}
        for seed, (size, steps) in enumerate([("32x24", 3), ("32x24", 6), ("16x16", 2), ("32x24", 9), ("16x16", 5)])
    ]
    together = await asyncio.gather(*(paint(client, **ask) for ask in asks))
    for ask, [picture] in zip(asks, together):
        np.testing.assert_allclose(picture, (await paint(client, **ask))[0], atol=ONE_LEVEL)


async def test_formats(client: openai.AsyncOpenAI) -> None:
    for format in ("png", "jpeg", "webp"):
        answer = await client.images.generate(
            model="flux",
            prompt=PROMPT,
            size="32x24",
            output_format=format,
            extra_body={"steps": 1},  # type: ignore[arg-type]
        )
        assert (answer.output_format, answer.size) == (format, "32x24")
        assert read(answer.data[0].b64_json, format.upper()).shape == (24, 32, 3)


async def test_stream_tells_every_step(client: openai.AsyncOpenAI) -> None:
    events = await client.images.generate(
        model="flux", prompt=PROMPT, size="32x24", n=2, stream=True, extra_body={"steps": 3, "seed": 7}
    )
    told = [event.model_dump() async for event in events]
    steps = [(event["index"], event["step"]) for event in told if event["type"] == "image_generation.progress"]
    assert sorted(steps) == [(index, step) for index in range(2) for step in (1, 2, 3)]
    done = {event["index"]: event for event in told if event["type"] == "image_generation.completed"}
    for index, picture in enumerate(await paint(client, n=2)):
        assert done[index]["seed"] == 7 + index
        np.testing.assert_array_equal(read(done[index]["b64_json"]), picture)
    assert told[-1]["type"] == "image_generation.done"
    assert told[-1]["receipt"]["steps_run"] == 6


async def test_a_text_is_encoded_once(http: httpx.AsyncClient) -> None:
    body = {"model": "flux", "prompt": "once", "size": "16x16", "steps": 1}
    hits = [(await http.post("/v1/images/generations", json=body)).json()["receipt"]["encoder_hits"] for _ in range(2)]
    assert hits == [0, 1]


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"size": "100000x10000"}, "size", "pixels"),
        ({"size": "0x0"}, "size", "multiples of 4"),
        ({"size": "-1x5"}, "size", ""),
        ({"size": "30x32"}, "size", "multiples of 4"),
        ({"size": "4000x40"}, "size", "8 times"),
        ({"size": "2048x2048", "n": 5}, "n", "pixels"),
        ({"n": 0}, "n", ""),
        ({"steps": 100_000}, "steps", "200"),
        ({"guidance": 1e9}, "guidance", "100"),
        ({"negative_prompt": "lazy"}, "true_cfg_scale", "need each other"),
        ({"prompt": "fox " * 600}, "prompt", "512"),
        ({"response_format": "file"}, "response_format", "b64_json"),
        ({"partial_images": 2}, None, "stream"),
        ({"partial_images": 4, "stream": True}, "partial_images", ""),
        ({"quality": "best"}, "quality", "balanced"),
        ({"output_compression": 10}, None, "jpeg"),
    ],
)
async def test_refused_before_anything_is_allocated(
    http: httpx.AsyncClient, fields: dict[str, Any], param: str | None, said: str
) -> None:
    """vllm-omni 3274: 100000x10000 killed the server. transformerlab 616: an odd size failed deep inside."""
    answer = await http.post("/v1/images/generations", json={"model": "flux", "prompt": "a", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert said in error["message"]


async def test_who_leaves_frees_the_engine(http: httpx.AsyncClient, behind: Any) -> None:
    """docker model-runner 1041: ghost work after a disconnect."""
    body = {"model": "flux", "prompt": "long", "size": "256x256", "steps": 200, "n": 4}
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(http.post("/v1/images/generations", json=body), 0.5)
    answer = await asyncio.wait_for(
        http.post("/v1/images/generations", json={**body, "size": "16x16", "steps": 1, "n": 1}), 20
    )
    assert answer.status_code == 200
    behind.check_integrity()


def test_the_old_files_of_clip_spell_the_same(folder: Path, diffusers: FluxPipeline) -> None:
    tokenizer = build_clip(folder / "tokenizer" / "vocab.json", folder / "tokenizer" / "merges.txt")
    for text in (PROMPT, "  It's\n\tNAÏVE, 東京 & the  thé 42's! <|endoftext|>", ""):
        assert tokenizer.encode(text).ids == diffusers.tokenizer(text).input_ids


def test_what_overflows_is_decoded_again(folder: Path, diffusers: FluxPipeline) -> None:
    """diffusers 4325: a black picture, with 200. Half precision overflows here, float32 does not."""
    vae = AutoencoderKL.from_pretrained(folder / "vae")
    with torch.no_grad():
        vae.decoder.conv_in.weight *= 1e7
        latent = torch.randn(vae.config.latent_channels, 4, 4, generator=torch.Generator().manual_seed(0))
        [exact] = LatentDecoder(vae).forward([latent], [])
        [retried] = LatentDecoder(AutoencoderKL.from_config(vae.config).half()).forward([latent * 1e7], [])
        assert isinstance(retried, torch.Tensor)
        [broken] = LatentDecoder(vae).forward([latent * float("nan")], [])
    assert exact.shape == (8, 8, 3)
    assert isinstance(broken, InternalError)
