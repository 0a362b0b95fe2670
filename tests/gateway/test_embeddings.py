"""Embeddings: every shape of input, both encodings, the order of the inputs."""

from __future__ import annotations

import base64
import struct
from typing import Any

import httpx
import numpy as np
import pytest

from polymux.core.tasks import Done, Embed, Vector
from polymux.core.testing.service import FakeService
from polymux.core.vocabulary import Receipt, Usage
from polymux.gateway.schemas.embeddings import EmbeddingList

pytestmark = pytest.mark.anyio

PATH = "/v1/embeddings"


@pytest.mark.parametrize(
    ("value", "inputs"), [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1], [2, 3]], [[1], [2, 3]])]
)
async def test_inputs_of_every_shape(client: httpx.AsyncClient, service: FakeService, value: Any, inputs: Any) -> None:
    """infinity 349, TEI 288: token arrays were refused."""
    answer = await client.post(PATH, json={"model": "stub", "input": value, "truncate": True, "dimensions": 3})
    assert service.opened[0].ask == Embed(inputs=inputs, dimensions=3, truncate=True)
    EmbeddingList.model_validate_json(answer.content)
    data = answer.json()["data"]
    assert [item["index"] for item in data] == list(range(len(inputs)))
    assert all(len(item["embedding"]) == 3 for item in data)


async def test_base64_is_the_float_form(client: httpx.AsyncClient) -> None:
    """infinity 349, TEI 288: base64 was refused or ignored. It is little-endian float32."""
    asked = {"model": "stub", "input": ["a", "bcd"]}
    floats = (await client.post(PATH, json={**asked, "encoding_format": "float"})).json()
    packed = (await client.post(PATH, json={**asked, "encoding_format": "base64"})).json()
    for plain, coded in zip(floats["data"], packed["data"]):
        raw = base64.b64decode(coded["embedding"])
        assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == plain["embedding"]
    assert floats["usage"] == packed["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert floats["receipt"]["launches"] == 1


async def test_order_is_the_inputs_whatever_finishes_first(client: httpx.AsyncClient, service: FakeService) -> None:
    async def backwards(served: Any, task: str, ask: Embed) -> Any:
        for index in reversed(range(len(ask.inputs))):
            yield Vector(index, struct.pack("<f", float(index)))
        yield Done(Usage(3), Receipt())

    service.script = backwards
    answer = await client.post(PATH, json={"model": "stub", "input": ["a", "b", "c"]})
    assert [item["embedding"] for item in answer.json()["data"]] == [[0.0], [1.0], [2.0]]


async def test_quantized_vectors(client: httpx.AsyncClient, service: FakeService) -> None:
    """int8, uint8 and bits, as numbers and in base64, all from the same vector."""
    vector = np.array([0.5, -0.25, 1.0, -1.0, 0.0, 0.1, -0.1, 0.2, 0.3], "<f4")

    async def speak(served: Any, task: str, ask: Any) -> Any:
        yield Vector(0, vector.tobytes())
        yield Done(Usage(input_tokens=1), Receipt())

    async def embed(**options: Any) -> Any:
        body = {"model": "stub", "input": "hi", **options}
        return (await client.post(PATH, json=body)).json()["data"][0]["embedding"]

    service.script = speak
    expected = {
        "int8": [64, -32, 127, -127, 0, 13, -13, 25, 38],
        "uint8": [192, 96, 255, 1, 128, 141, 115, 153, 166],
        "ubinary": [0b10100101, 0b10000000],
        "binary": [0b10100101 - 128, 0],
    }
    for dtype, numbers in expected.items():
        assert await embed(output_dtype=dtype) == numbers
        packed = await embed(output_dtype=dtype, encoding_format="base64")
        kind = np.uint8 if dtype.startswith("u") else np.int8
        assert np.frombuffer(base64.b64decode(packed), kind).tolist() == numbers
    refused = await client.post(PATH, json={"model": "stub", "input": "hi", "output_dtype": "int4"})
    assert refused.status_code == 400
