"""`POST /v1/images/generations`: pictures, with progress while they are made."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Awaitable

import msgspec
from PIL import Image
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.tasks import Done, Picture, Progress
from polymux.gateway.answering import EventFrames, StreamResponse, WholeResponse, encode_model, frame_model
from polymux.gateway.bodies import read_request
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.images import ImageBody, ImageEvent, ImageFormat, ImageRequest, ImagesAnswer, ImageUsage
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.state import gateway_of


async def generate_images(request: Request) -> ASGIApp:
    body = await read_request(request, ImageRequest, gateway_of(request).settings.max_body_bytes)
    call = open_call(request, body.model, "image", body.ask(), weight=body.n or 1)
    encoder = PictureEncoder(
        body.output_format or "png", 100 if body.output_compression is None else body.output_compression
    )
    if body.stream:
        return StreamResponse(call, ImageStream(encoder))
    return WholeResponse(call, WholeImages(encoder))


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/images/generations",
    summary="Paint pictures of a text",
    tag="images",
    handle=generate_images,
    request=ImageRequest,
    response=ImagesAnswer,
    stream=ImageEvent,
)


class PictureEncoder:
    """Pictures as files, in base64. `quality` is that of formats which lose something."""

    def __init__(self, format: ImageFormat, quality: int) -> None:
        self.format = format
        self.quality = quality

    def encode(self, picture: Picture) -> str:
        file = io.BytesIO()
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.data)
        options = {} if self.format == "png" else {"quality": self.quality}
        image.save(file, self.format, **options)
        return base64.b64encode(file.getvalue()).decode()


class WholeImages:
    """Collects the pictures, and encodes them at the end, in order, on a thread."""

    def __init__(self, encoder: PictureEncoder) -> None:
        self.encoder = encoder
        self.pictures: list[Picture] = []

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Picture):
            self.pictures.append(answer)

    def finish(self, done: Done) -> Awaitable[bytes]:
        return asyncio.to_thread(self._encode, done)

    def _encode(self, done: Done) -> bytes:
        pictures = sorted(self.pictures, key=lambda picture: picture.index)
        return encode_model(
            ImagesAnswer(
                created=int(time.time()),
                data=[ImageBody(b64_json=self.encoder.encode(picture), seed=picture.seed) for picture in pictures],
                size=name_size(pictures[0]),
                output_format=self.encoder.format,
                usage=ImageUsage.of(done.usage),
                receipt=ReceiptBody.of(done.receipt),
            )
        )


class ImageStream(EventFrames):
    """An event for every step, and one for every picture as soon as it is there."""

    def __init__(self, encoder: PictureEncoder) -> None:
        self.encoder = encoder

    def write(self, answer: msgspec.Struct) -> bytes | Awaitable[bytes]:
        match answer:
            case Progress(index=index, step=step, steps=steps):
                return frame_model(ImageEvent(type="image_generation.progress", index=index, step=step, steps=steps))
            case Picture():
                return asyncio.to_thread(self._frame, answer)
            case Done(usage=usage, receipt=receipt):
                return frame_model(
                    ImageEvent(
                        type="image_generation.done", usage=ImageUsage.of(usage), receipt=ReceiptBody.of(receipt)
                    )
                )
        return b""

    def _frame(self, picture: Picture) -> bytes:
        return frame_model(
            ImageEvent(
                type="image_generation.completed",
                index=picture.index,
                b64_json=self.encoder.encode(picture),
                seed=picture.seed,
                created_at=int(time.time()),
                size=name_size(picture),
                output_format=self.encoder.format,
                background="opaque",
            )
        )


def name_size(picture: Picture) -> str:
    return f"{picture.width}x{picture.height}"
