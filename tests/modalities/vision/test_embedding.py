"""Pictures and texts in one space: the vectors are transformers' own, a known picture costs no pass."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer
from transformers import AutoModel

pytestmark = pytest.mark.anyio


def expect(folder: Any, kind: str, pictures: list[Image.Image], texts: list[str]) -> np.ndarray:
    model = AutoModel.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    pixels = np.stack([np.asarray(each.resize((16, 16), Image.Resampling.BICUBIC)) for each in pictures]) / 255
    scaled = (pixels - np.array([0.5, 0.4, 0.6])) / np.array([0.2, 0.3, 0.25])
    rows = []
    with torch.no_grad():
        told = torch.from_numpy(scaled.astype(np.float32)).permute(0, 3, 1, 2)
        rows.append(model.get_image_features(pixel_values=told).pooler_output)
        for text in texts:
            ids = tokenizer.encode(text.lower() if kind == "siglip" else text).ids
            if kind == "siglip":
                ids = ids + [tokenizer.token_to_id("<|im_end|>")] * (40 - len(ids))
            rows.append(model.get_text_features(input_ids=torch.tensor([ids])).pooler_output)
    return torch.nn.functional.normalize(torch.cat(rows), dim=1).numpy()


def show(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def embed(http: Any, model: str, inputs: Any, **options: Any) -> Any:
    return (await http.post("/v1/embeddings", json={"model": model, "input": inputs, **options})).json()


def vectors(answer: Any) -> np.ndarray:
    return np.array([each["embedding"] for each in answer["data"]])


@pytest.mark.parametrize("kind", ["clip", "siglip"])
async def test_vectors_are_those_of_transformers(serve, folders, draw, uri, kind) -> None:
    pictures = [draw(seed, 24, 30) for seed in range(2)]
    texts = ["A fox<|im_end|>", "The quick brown dog jumps.<|im_end|>"]
    async with serve(kind) as http:
        inputs = [*(show(uri(each)) for each in pictures), texts[0], {"type": "text", "text": texts[1]}]
        answer = await embed(http, kind, inputs)
        plain = await embed(http, kind, texts)
        packed = await embed(http, kind, inputs, encoding_format="base64")
    expected = expect(folders(kind), kind, pictures, texts)
    np.testing.assert_allclose(vectors(answer), expected, atol=2e-5)
    np.testing.assert_allclose(vectors(plain), expected[2:], atol=2e-5)
    unpacked = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in packed["data"]]
    np.testing.assert_allclose(unpacked, expected, atol=2e-5)
    assert answer["receipt"]["encoder_hits"] == 0
    assert packed["receipt"]["encoder_hits"] == 2


async def test_zero_shot(serve, draw, uri) -> None:
    """A picture is told from words by the angle between their vectors: one space, unit lengths."""
    async with serve("clip") as http:
        words = vectors(await embed(http, "clip", ["a cat", "a dog", "a fox"]))
        picture = vectors(await embed(http, "clip", [show(uri(draw(1)))]))[0]
    scores = words @ picture
    assert scores.shape == (3,)
    assert np.all(np.abs(scores) <= 1 + 1e-6)
    np.testing.assert_allclose(np.linalg.norm(words, axis=1), 1, atol=1e-5)


async def test_chats_and_vectors_share_what_the_encoder_made(serve, draw, uri) -> None:
    """A chat model embeds pictures too; what one has shown it costs the other no pass."""
    url = uri(draw(1))
    body = {"model": "qwen3-vl", "max_tokens": 1, "messages": [{"role": "user", "content": [show(url)]}]}
    async with serve("qwen3-vl") as http:
        first = await embed(http, "qwen3-vl", [show(url), show(url)])
        chat = (await http.post("/v1/chat/completions", json=body)).json()
        again = await embed(http, "qwen3-vl", [show(url)])
        text = await embed(http, "qwen3-vl", ["words"])
    assert [answer["receipt"]["encoder_hits"] for answer in (first, chat, again)] == [1, 1, 1]
    np.testing.assert_array_equal(vectors(first)[0], vectors(again)[0])
    assert text["error"]["param"] == "input"


@pytest.mark.parametrize(
    ("inputs", "options"),
    [
        ([{"type": "image_url", "image_url": {"url": "http://x/"}}], {}),
        ([{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}], {}),
        ([{"type": "video", "video": ["data:,"]}], {}),
        (["word " * 100], {}),
        (["words"], {"dimensions": 3}),
        ([{"type": "text", "text": ""}], {}),
    ],
)
async def test_what_is_refused(serve, inputs, options) -> None:
    async with serve("clip") as http:
        answer = await embed(http, "clip", inputs, **options)
    assert answer["error"]["type"] == "invalid_request_error"
