"""Edits, variations, previews, urls and presets, through the gateway by the official client."""

from __future__ import annotations

import asyncio
import base64
import io
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import diffusers
import httpx
import numpy as np
import openai
import pytest
import torch
from PIL import Image

from polymux.core.testing.painting import save_tiny_flux
from polymux.core.testing.pipelines import save_tiny
from polymux.modalities.diffusion.plugin import Painting

pytestmark = pytest.mark.anyio

PROMPT = "The quick brown fox"
ONE_LEVEL = 1 / 255 + 1e-3
KINDS = ("sd3", "sd", "flux", "sdxl", "qwen")
ALL = (*KINDS, "pixart")
PROGRAM = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 16\n%%EndComments\nshowpage\n"
"""A picture that another program would be started for."""


@pytest.fixture(scope="module")
def peers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    folders = {kind: tmp_path_factory.mktemp(kind) for kind in ALL}
    return {
        kind: (folder, save_tiny_flux(folder) if kind == "flux" else save_tiny(kind, folder))
        for kind, folder in folders.items()
    }


@pytest.fixture(scope="module")
async def behind(serve: Any, peers: dict[str, tuple[Path, Any]]) -> AsyncIterator[Any]:
    """A gateway with what answers behind it."""
    async with serve(Painting(), {kind: folder for kind, (folder, _) in peers.items()}) as behind:
        yield behind


@pytest.fixture(scope="module")
def http(behind: Any) -> httpx.AsyncClient:
    return behind.http  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def client(behind: Any) -> openai.AsyncOpenAI:
    return behind.client  # type: ignore[no-any-return]


def save(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


def make_picture(width: int = 32, height: int = 16) -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC)


def make_mask(width: int = 32, height: int = 16) -> Image.Image:
    """Transparent on the right half."""
    alpha = np.full((height, width), 255, np.uint8)
    alpha[:, width // 2 :] = 0
    mask = make_picture(width, height).convert("RGBA")
    mask.putalpha(Image.fromarray(alpha))
    return mask


def read(answer: Any) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(answer.data[0].b64_json)))) / 255


async def edit(client: openai.AsyncOpenAI, kind: str, mask: Image.Image | None = None, **extra: Any) -> np.ndarray:
    files: dict[str, Any] = {"image": ("a.png", save(make_picture()))}
    if mask is not None:
        files["mask"] = ("mask.png", save(mask))
    body = {"steps": 6, "seed": 5, "guidance": 3.0, **extra}
    return read(await client.images.edit(model=kind, prompt=PROMPT, extra_body=body, **files))


PEERS = {
    "sd3": (diffusers.StableDiffusion3Img2ImgPipeline, diffusers.StableDiffusion3InpaintPipeline),
    "sd": (diffusers.StableDiffusionImg2ImgPipeline, diffusers.StableDiffusionInpaintPipeline),
    "sdxl": (diffusers.StableDiffusionXLImg2ImgPipeline, diffusers.StableDiffusionXLInpaintPipeline),
    "flux": (diffusers.FluxImg2ImgPipeline, diffusers.FluxInpaintPipeline),
    "qwen": (diffusers.QwenImageImg2ImgPipeline, diffusers.QwenImageInpaintPipeline),
}
SIZED = ("sd3", "flux", "qwen")
"""Kinds whose pipeline for pictures alone is told the size."""


def edit_alone(peers: dict[str, tuple[Path, Any]], kind: str, *, masked: bool, strength: float) -> np.ndarray:
    """diffusers' own pipeline for it, over the same parts."""
    parts = dict(peers[kind][1].components)
    options: dict[str, Any] = {"requires_safety_checker": False} if kind == "sd" else {}
    pipeline = PEERS[kind][masked](**parts, **options)
    pipeline.set_progress_bar_config(disable=True)
    more: dict[str, Any] = {}
    if masked:
        mask = Image.fromarray((np.asarray(make_mask().getchannel("A")) < 128).astype(np.uint8) * 255)
        more = {"mask_image": mask}
    if masked or kind in SIZED:
        more |= {"width": 32, "height": 16}
    if kind == "qwen":
        more |= {"true_cfg_scale": 3.0, "negative_prompt": " "}
    else:
        more["guidance_scale"] = 3.0
    image: np.ndarray = pipeline(
        prompt=PROMPT,
        image=make_picture(),
        strength=strength,
        num_inference_steps=6,
        generator=torch.Generator().manual_seed(5),
        output_type="np",
        **more,
    ).images[0]
    return image


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("strength", [0.5, 1.0])
async def test_a_picture_is_changed_as_diffusers_changes_it(client, peers, kind, strength) -> None:
    ours = await edit(client, kind, strength=strength)
    np.testing.assert_allclose(ours, edit_alone(peers, kind, masked=False, strength=strength), atol=ONE_LEVEL)


@pytest.mark.parametrize("kind", ALL)
async def test_a_mask_repaints_what_is_transparent_and_keeps_the_rest(client, peers, kind) -> None:
    """A1111 12898, 16854: a mask's alpha was misread. Outside, every pixel is the one that was sent."""
    ours = await edit(client, kind, make_mask())
    sent = np.asarray(make_picture()) / 255
    np.testing.assert_array_equal(ours[:, :16], sent[:, :16])
    assert np.abs(ours[:, 16:] - sent[:, 16:]).mean() > 0.02
    if kind in KINDS and kind != "sd3":  # its pipeline takes models of 16 channels only
        alone = edit_alone(peers, kind, masked=True, strength=1.0)
        np.testing.assert_allclose(ours[:, 16:], alone[:, 16:], atol=ONE_LEVEL)


async def test_pixart_starts_from_a_picture_too(client, peers) -> None:
    """diffusers has no such pipeline: its parts, called as its pipelines of other kinds call theirs."""
    ours = await edit(client, "pixart", strength=0.5)
    pipeline = peers["pixart"][1]
    scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config)
    scheduler.set_timesteps(6)
    scheduler.set_begin_index(3)
    with torch.inference_mode():
        text, mask, negative, negative_mask = pipeline.encode_prompt(PROMPT, clean_caption=False)
        texts, masks = torch.cat([text, negative]), torch.cat([mask, negative_mask])
        generator = torch.Generator().manual_seed(5)
        pixels = torch.tensor(np.asarray(make_picture())).permute(2, 0, 1)[None] / 127.5 - 1
        clean = pipeline.vae.encode(pixels).latent_dist.sample(generator) * pipeline.vae.config.scaling_factor
        latents = scheduler.add_noise(clean, torch.randn(clean.shape, generator=generator), scheduler.timesteps[3:4])
        for time in scheduler.timesteps[3:]:
            predicted, plain = pipeline.transformer(
                torch.cat([latents] * 2),
                texts,
                timestep=time.expand(2),
                encoder_attention_mask=masks,
                return_dict=False,
            )[0].chunk(2)
            guided = plain + 3.0 * (predicted - plain)
            latents = scheduler.step(guided[:, :4], time, latents, return_dict=False)[0]
        picture = pipeline.vae.decode(latents / pipeline.vae.config.scaling_factor, return_dict=False)[0]
    alone = (picture[0] / 2 + 0.5).clamp(0, 1).permute(1, 2, 0).numpy()
    np.testing.assert_allclose(ours, alone, atol=ONE_LEVEL)


async def test_edits_that_cannot_be(http: httpx.AsyncClient) -> None:
    picture = save(make_picture())
    fields = {"model": "sd", "prompt": "a", "steps": "2"}
    cases: list[tuple[dict[str, bytes], dict[str, str], str]] = [
        ({"image": picture, "mask": save(make_mask(16, 16))}, {}, "agree"),
        ({"image": picture, "mask": picture}, {}, "alpha"),
        ({"image": b"not a picture"}, {}, "image is no picture in a format that is read here"),
        ({"image": PROGRAM}, {}, "image is no picture in a format that is read here"),
        ({"image": picture, "mask": PROGRAM}, {}, "mask is no picture in a format that is read here"),
        ({"image": picture}, {"size": "0x0"}, "at least 2"),
        ({"image": save(make_picture(33, 17))}, {}, "at least 2; that is the image's own size"),
        ({"image": picture}, {"strength": "nan"}, ""),
        ({"mask": save(make_mask())}, {}, "required"),
    ]
    for files, more, said in cases:
        sent = {name: (f"{name}.png", data) for name, data in files.items()}
        answer = await http.post("/v1/images/edits", data={**fields, **more}, files=sent)
        assert answer.status_code == 400, (said, answer.text)
        assert said.lower() in answer.json()["error"]["message"].lower()


async def test_variations_are_alike_and_not_the_same(client: openai.AsyncOpenAI) -> None:
    answer = await client.images.create_variation(
        model="sd", image=("a.png", save(make_picture())), n=2, extra_body={"steps": 5, "seed": 3}
    )
    first, second = (np.asarray(Image.open(io.BytesIO(base64.b64decode(each.b64_json)))) for each in answer.data)
    assert first.shape == second.shape == (16, 32, 3)
    assert (first != second).any()


async def test_previews_come_before_their_picture(client: openai.AsyncOpenAI) -> None:
    events = await client.images.generate(
        model="sd3", prompt=PROMPT, size="32x16", stream=True, partial_images=2, extra_body={"steps": 6, "seed": 7}
    )
    told = [event async for event in events]
    kinds = [event.type for event in told]
    partial = [event for event in told if event.type == "image_generation.partial_image"]
    assert [event.partial_image_index for event in partial] == [0, 1]
    assert kinds.index("image_generation.partial_image") < kinds.index("image_generation.completed")
    pictures = [np.asarray(Image.open(io.BytesIO(base64.b64decode(event.b64_json)))) / 255.0 for event in partial]
    assert all(picture.shape == (16, 32, 3) for picture in pictures)
    final = next(event for event in told if event.type == "image_generation.completed")
    made = np.asarray(Image.open(io.BytesIO(base64.b64decode(final.b64_json)))) / 255
    assert np.abs(pictures[1] - made).mean() < np.abs(pictures[0] - made).mean() + 0.05


async def test_a_url_leads_to_the_picture(client: openai.AsyncOpenAI, http: httpx.AsyncClient) -> None:
    options: dict[str, Any] = {"model": "sd", "prompt": PROMPT, "size": "32x16", "output_format": "webp"}
    body = {"steps": 2, "seed": 1, "output_compression": 90}
    pointed = await client.images.generate(**options, response_format="url", extra_body=body)
    given = await client.images.generate(**options, extra_body=body)
    assert pointed.data[0].b64_json is None
    file = await http.get(pointed.data[0].url)
    assert file.headers["content-type"] == "image/webp"
    assert file.content == base64.b64decode(given.data[0].b64_json)
    assert (await http.get("/v1/images/files/nothing.png")).status_code == 404


async def test_presets_skip_steps_and_say_so(http: httpx.AsyncClient) -> None:
    body = {"model": "sd", "prompt": PROMPT, "size": "32x16", "steps": 12, "seed": 1}

    async def ask(**more: Any) -> dict[str, Any]:
        answer = await http.post("/v1/images/generations", json={**body, **more})
        assert answer.status_code == 200, answer.text
        receipt: dict[str, Any] = answer.json()["receipt"]
        return receipt

    exact, balanced, fast = [await ask(quality=name) for name in ("exact", "balanced", "fast")]
    assert exact["steps_skipped"] == 0
    assert 0 < balanced["steps_skipped"] < fast["steps_skipped"]
    assert all(each["steps_run"] + each["steps_skipped"] == exact["steps_run"] for each in (balanced, fast))
    few = await ask(quality="fast", steps=4)
    assert few["steps_skipped"] == 0, "too few steps to leave any out"
    assert (await ask())["steps_skipped"] == 0


async def test_a_strict_picture_is_the_same_bits_in_any_company(client: openai.AsyncOpenAI) -> None:
    """sglang 28502: what a neighbour does to an image."""

    async def paint(seed: int, **more: Any) -> bytes:
        answer = await client.images.generate(
            model="sd3", prompt=PROMPT, size="32x16", extra_body={"steps": 4, "seed": seed, "strict": True, **more}
        )
        assert answer.data[0].b64_json is not None
        return base64.b64decode(answer.data[0].b64_json)

    alone = await paint(1)
    among, *_ = await asyncio.gather(paint(1), paint(2), paint(3, strict=False), paint(4, strict=False))
    assert among == alone
