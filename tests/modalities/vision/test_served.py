"""Pictures through the gateway, asked by the official clients: whole, streamed, compared, and asked about twice."""

from __future__ import annotations

import base64
import json
import struct
import zlib
from typing import Any

import httpx2
import numpy as np
import pytest
import torch
from anthropic import AsyncAnthropic
from openai import AsyncOpenAI, BadRequestError
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

pytestmark = pytest.mark.anyio


def open_client(http: Any) -> AsyncOpenAI:
    return AsyncOpenAI(api_key="none", base_url="http://tiny/v1", http_client=http, max_retries=0)


def show(*parts: str) -> Any:
    """Data URIs are pictures, everything else words."""
    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": part}}
        if part.startswith("data:")
        else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


async def ask(client: AsyncOpenAI, *parts: str, model: str = "qwen3-vl", **options: Any) -> Any:
    options = {"max_tokens": 8, "temperature": 0, **options}
    return await client.chat.completions.create(model=model, messages=show(*parts), **options)


def answer_of(folder: Any, pictures: list[Any], text: str, tokens: int = 8) -> str:
    """What transformers answers to `text`, in which "@" stands for the next picture."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    told = Qwen2VLImageProcessorPil(**processor)(pictures, return_tensors="pt")
    for grid in told["image_grid_thw"]:
        places = "<|image_pad|>" * (int(grid.prod()) // 4)
        text = text.replace("@", f"<|vision_start|>{places}<|vision_end|>", 1)
    prompt = f"<|im_start|>user {text}<|im_end|><|im_start|>assistant "
    ids = torch.tensor([tokenizer.encode(prompt, add_special_tokens=False).ids])
    image = tokenizer.token_to_id("<|image_pad|>")
    model = AutoModelForImageTextToText.from_pretrained(folder)
    found = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        mm_token_type_ids=(ids == image).int(),
        max_new_tokens=tokens,
        do_sample=False,
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        **told,
    )
    return tokenizer.decode(found[0, ids.shape[1] :].tolist())


async def test_a_picture_by_data_uri_whole_and_streamed(serve, folders, draw, uri) -> None:
    """The answer is transformers' own, from the file's bytes to the last word."""
    picture = draw(1)
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        whole = await ask(client, "What is", uri(picture), "this?")
        chunks = [chunk async for chunk in await ask(client, "What is", uri(picture), "this?", stream=True)]
    expected = answer_of(folders("qwen3-vl"), [picture], "What is@this?")
    assert whole.choices[0].message.content == expected
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
    assert whole.usage.prompt_tokens > 15


async def test_two_pictures_are_compared(serve, folders, draw, uri) -> None:
    """In their order, whatever their shapes."""
    one, two = draw(1), draw(2, 16, 64)
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        found = [
            (await ask(client, "A:", uri(first), "B:", uri(second), "Which?")).choices[0].message.content
            for first, second in ((one, two), (two, one))
        ]
    folder = folders("qwen3-vl")
    assert found == [answer_of(folder, pair, "A:@B:@Which?") for pair in ([one, two], [two, one])]


@pytest.mark.parametrize("kind", ["qwen3-vl", "smolvlm", "llava"])
async def test_the_same_picture_in_a_second_question_costs_no_pass(serve, draw, uri, kind) -> None:
    async with serve(kind) as http:
        client = open_client(http)
        hits = [
            (await ask(client, uri(draw(seed)), words, model=kind)).receipt["encoder_hits"]
            for seed, words in ((1, "What?"), (1, "Why so?"), (2, "What?"))
        ]
    assert hits == [0, 1, 0]


async def test_what_a_viewer_sees_is_what_counts(serve, draw, uri) -> None:
    """Alpha, palette, orientation, animation, depth: the encoder knows the picture already by its plain form."""
    plain = draw(1).quantize(64).convert("RGB")
    clear = plain.convert("RGBA")
    clear.putpixel((0, 0), (9, 9, 9, 0))
    white = plain.copy()
    white.putpixel((0, 0), (255, 255, 255))
    turned = plain.transpose(method=4)  # a quarter turn, which EXIF takes back
    exif = turned.getexif()
    exif[0x0112] = 6
    gray = plain.convert("L")
    deep = np.asarray(gray).astype(np.uint16) * 257
    variants = {
        "palette": (plain.quantize(64), {}, plain),
        "alpha": (clear, {}, white),
        "turned": (plain.transpose(method=2), {"exif": exif}, plain),
        "animated": (plain, {"format": "gif", "save_all": True, "append_images": [draw(5)]}, plain),
        "16 bit": (Image.fromarray(deep), {}, gray.convert("RGB")),
        "cmyk": (plain.convert("CMYK"), {"format": "tiff"}, None),
        "1 x 1": (plain.crop((0, 0, 1, 1)), {}, None),
        "bits": (plain.convert("1"), {}, plain.convert("1").convert("RGB")),
        "webp": (plain, {"format": "webp", "lossless": True}, plain),
        "bmp": (plain, {"format": "bmp"}, plain),
    }
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        for name, (picture, options, same) in variants.items():
            if same is not None:
                await ask(client, uri(same), "x", max_tokens=1)
            found = await ask(client, uri(picture, **options), "y", max_tokens=1)
            assert same is None or found.receipt["encoder_hits"] == 1, name


BAD = {
    "no base64 marker": "data:image/png,abcd",
    "no data": "data:image/png;base64,",
    "not base64": "data:image/png;base64,@@@@",
    "no picture": "data:image/png;base64,aGVsbG8gd29ybGQ=",
    "a program": "data:image/eps;base64,JSFQUy1BZG9iZS0zLjAgRVBTRi0zLjAKJSVCb3VuZGluZ0JveDogMCAwIDEwIDEwCg==",
}


@pytest.mark.parametrize("url", BAD.values(), ids=BAD)
async def test_what_is_no_picture_is_a_400_that_says_so(serve, url) -> None:
    async with serve("qwen3-vl") as http:
        with pytest.raises(BadRequestError) as raised:
            await ask(open_client(http), "look", url)
    assert raised.value.body["param"] == "messages[0].content[1].image_url"


async def test_base64_is_read_by_one_rule(serve, draw, uri) -> None:
    """URL-safe, unpadded, with line ends: all the same picture."""
    whole = uri(draw(3, 41, 23))
    head, _, body = whole.partition(",")
    variants = [body.rstrip("="), body.replace("+", "-").replace("/", "_"), "\n".join([body[:40], body[40:]])]
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        await ask(client, whole, "x", max_tokens=1)
        for body in variants:
            assert (await ask(client, f"{head},{body}", "x", max_tokens=1)).receipt["encoder_hits"] == 1


async def test_a_cut_file_and_a_bomb_are_refused(serve, draw, uri) -> None:
    """A header that promises four billion pixels is refused before any is made."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", 65_000, 65_000, 8, 2, 0, 0, 0)
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", b"x") + chunk(b"IEND", b"")
    cut = uri(draw(1))
    cut = cut[: len(cut) // 2 // 4 * 4]
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        for url in (cut, f"data:image/png;base64,{base64.b64encode(bomb).decode()}"):
            with pytest.raises(BadRequestError):
                await ask(client, "look", url)


async def test_addresses_words_for_pictures_and_too_many_are_refused(serve, draw, uri) -> None:
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        message = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254/"}}]}
        for messages, complaint in (
            ([message], "nothing is fetched here"),
            (show("look at <|image_pad|>"), "stands for a picture"),
            (show(*[uri(draw(1, 8, 8))] * 129), "At most 128"),
            (show(*[uri(draw(1))] * 100), "context"),
        ):
            with pytest.raises(BadRequestError, match=complaint):
                await client.chat.completions.create(model="qwen3-vl", messages=messages, max_tokens=1)


async def test_a_clip_with_times(serve, draw, uri) -> None:
    frames = [uri(draw(seed, 24, 16)) for seed in range(4)]
    part = {"type": "video", "video": frames, "timestamps": [0.0, 0.4, 1.0, 1.4]}
    body = {
        "model": "qwen3-vl",
        "max_tokens": 4,
        "messages": [{"role": "user", "content": [part, {"type": "text", "text": "When?"}]}],
    }
    async with serve("qwen3-vl") as http:
        answers = [(await http.post("/v1/chat/completions", json=body)).json() for _ in range(2)]
        body["messages"][0]["content"][0] = {**part, "timestamps": [0.0, 0.4]}
        wrong = await http.post("/v1/chat/completions", json=body)
    assert [answer["receipt"]["encoder_hits"] for answer in answers] == [0, 1]
    assert wrong.status_code == 400


async def test_the_other_protocols_carry_pictures_too(serve, draw, uri) -> None:
    """Responses and messages: what a chat has shown the encoder, they show it again."""
    url = uri(draw(1))
    async with serve("qwen3-vl") as http:
        client = open_client(http)
        chat = await ask(client, url, "What?")
        response = await client.responses.create(
            model="qwen3-vl",
            max_output_tokens=8,
            temperature=0,
            input=[
                {
                    "role": "user",
                    "content": [
                        {"type": "input_image", "image_url": url, "detail": "auto"},
                        {"type": "input_text", "text": "What?"},
                    ],
                }
            ],
        )
    assert response.output_text == chat.choices[0].message.content
    assert response.receipt["encoder_hits"] == 1
    async with serve("qwen3-vl", library=httpx2) as http:
        client = AsyncAnthropic(api_key="none", base_url="http://tiny", http_client=http, max_retries=0)
        source = {"type": "base64", "media_type": "image/png", "data": url.partition(",")[2]}
        blocks = [{"type": "image", "source": source}, {"type": "text", "text": "What?"}]
        turn: Any = {"role": "user", "content": blocks}
        message = await client.messages.create(
            model="qwen3-vl", max_tokens=8, extra_body={"temperature": 0}, messages=[turn]
        )
        counted = await client.messages.count_tokens(model="qwen3-vl", messages=[turn])
        result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
        call = {"type": "tool_use", "id": "t", "name": "look", "input": {}}
        turns: Any = [turn, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
        shown = await client.messages.create(model="qwen3-vl", max_tokens=2, messages=turns)
    assert message.content[0].text == chat.choices[0].message.content
    assert counted.input_tokens == chat.usage.prompt_tokens
    assert shown.receipt["encoder_hits"] == 2


async def test_formats_and_choices_work_as_for_words(serve, draw, uri) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"], "additionalProperties": False}
    format = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}
    async with serve("qwen3-vl") as http:
        found = await ask(open_client(http), uri(draw(1)), "How many?", response_format=format, n=3, max_tokens=40)
    assert all(json.loads(choice.message.content)["n"] in (1, 2) for choice in found.choices)
