"""`/v1/images`: pictures of a text, edits and variations of a picture, with progress and previews in between."""

from __future__ import annotations

import asyncio
import base64
import io
import time
from collections.abc import Awaitable
from typing import Any, Literal

import msgspec
from PIL import Image
from starlette.requests import Request
from starlette.responses import FileResponse
from starlette.types import ASGIApp

from polymux.core.errors import InvalidRequest, NotFound
from polymux.core.tasks import Done, Picture, Preview, Progress
from polymux.gateway.answering import EventFrames, StreamResponse, WholeResponse, encode_model, frame_model
from polymux.gateway.auth import OPEN_FOLDER
from polymux.gateway.bodies import check_request, read_request
from polymux.gateway.forms import FormResponse, read_form
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.images import (
    ImageBody,
    ImageEditRequest,
    ImageEvent,
    ImageFields,
    ImageFormat,
    ImageRequest,
    ImagesAnswer,
    ImageUsage,
    ImageVariationRequest,
)
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.shelf import Shelf
from polymux.gateway.state import gateway_of

Kind = Literal["image_generation", "image_edit"]


async def generate_images(request: Request) -> ASGIApp:
    body = await read_request(request, ImageRequest, gateway_of(request).settings.max_body_bytes)
    return _answer(request, body, body.ask(), "image_generation")


async def edit_image(request: Request) -> ASGIApp:
    return await _answer_form(request, ImageEditRequest, 2)


async def vary_image(request: Request) -> ASGIApp:
    return await _answer_form(request, ImageVariationRequest, 1)


async def show_file(request: Request) -> ASGIApp:
    item = gateway_of(request).shelf.find(request.path_params["name"])
    if item is None:
        raise NotFound("there is no such image, or no longer")
    return FileResponse(item.path, media_type=item.media)


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/images/generations",
        summary="Paint pictures of a text",
        tag="images",
        handle=generate_images,
        request=ImageRequest,
        response=ImagesAnswer,
        stream=ImageEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/images/edits",
        summary="Change a picture, or a part of it, as a text says",
        tag="images",
        handle=edit_image,
        request=ImageEditRequest,
        request_media="multipart/form-data",
        response=ImagesAnswer,
        stream=ImageEvent,
    ),
    Endpoint(
        method="POST",
        path="/v1/images/variations",
        summary="Pictures like a picture",
        tag="images",
        handle=vary_image,
        request=ImageVariationRequest,
        request_media="multipart/form-data",
        response=ImagesAnswer,
    ),
    Endpoint(
        method="GET",
        path=OPEN_FOLDER + "{name}",
        summary="A picture that an answer pointed to",
        tag="images",
        handle=show_file,
        media="image/png",
    ),
)


async def _answer_form(
    request: Request, schema: type[ImageEditRequest] | type[ImageVariationRequest], files: int
) -> ASGIApp:
    form = await read_form(request, gateway_of(request).settings.max_upload_bytes, files=files)
    try:
        values = form.gather(frozenset({"image"}))
        images = values.get("image")
        if isinstance(images, list):
            if len(images) > 1:
                raise InvalidRequest("one image can be given", param="image")
            values["image"] = images[0]
        body = check_request(values, schema)
        ask = await asyncio.to_thread(body.ask)
        response = _answer(request, body, ask, "image_edit")
    except BaseException:
        form.close()
        raise
    return FormResponse(form, response)


def _answer(request: Request, body: ImageFields, ask: msgspec.Struct, kind: Kind) -> ASGIApp:
    call = open_call(request, body.model, "image", ask, weight=body.n or 1)
    quality = 100 if body.output_compression is None else body.output_compression
    encoder = PictureEncoder(body.output_format or "png", quality)
    if body.stream:
        return StreamResponse(call, ImageStream(encoder, kind))
    if body.response_format == "url":
        base = str(request.base_url).rstrip("/") + OPEN_FOLDER
        return WholeResponse(call, WholeImages(encoder, gateway_of(request).shelf, base))
    return WholeResponse(call, WholeImages(encoder))


class PictureEncoder:
    """Pictures as files. `quality` is that of formats which lose something."""

    def __init__(self, format: ImageFormat, quality: int) -> None:
        self.format = format
        self.quality = quality

    def encode(self, picture: Picture | Preview, size: tuple[int, int] | None = None) -> bytes:
        """Of another `size` where one is given."""
        file = io.BytesIO()
        image = Image.frombytes("RGB", (picture.width, picture.height), picture.data)
        if size is not None and size != image.size:
            image = image.resize(size, Image.Resampling.BICUBIC)
        options: dict[str, Any] = {} if self.format == "png" else {"quality": self.quality}
        image.save(file, self.format, **options)
        return file.getvalue()


class WholeImages:
    """Collects the pictures, and encodes them at the end, in order, on a thread. With a shelf, they are put there and
    the answer points to them, under `base`."""

    def __init__(self, encoder: PictureEncoder, shelf: Shelf | None = None, base: str = "") -> None:
        self.encoder = encoder
        self.shelf = shelf
        self.base = base
        self.pictures: list[Picture] = []

    def add(self, answer: msgspec.Struct) -> None:
        if isinstance(answer, Picture):
            self.pictures.append(answer)

    async def finish(self, done: Done) -> bytes:
        pictures = sorted(self.pictures, key=lambda picture: picture.index)
        bodies = [await asyncio.to_thread(self._give, picture) for picture in pictures]
        return encode_model(
            ImagesAnswer(
                created=int(time.time()),
                data=bodies,
                size=name_size(pictures[0]),
                output_format=self.encoder.format,
                usage=ImageUsage.of(done.usage),
                receipt=ReceiptBody.of(done.receipt),
            )
        )

    def _give(self, picture: Picture) -> ImageBody:
        file = self.encoder.encode(picture)
        if self.shelf is None:
            return ImageBody(b64_json=base64.b64encode(file).decode(), seed=picture.seed)
        name = self.shelf.put(file, f"image/{self.encoder.format}", f".{self.encoder.format}")
        return ImageBody(url=self.base + name, seed=picture.seed)


class ImageStream(EventFrames):
    """An event for every step, for every preview, and for every picture as soon as it is there."""

    def __init__(self, encoder: PictureEncoder, kind: Kind) -> None:
        self.encoder = encoder
        self.kind = kind

    def write(self, answer: msgspec.Struct) -> bytes | Awaitable[bytes]:
        match answer:
            case Progress(index=index, step=step, steps=steps):
                return self._tell("progress", index=index, step=step, steps=steps)
            case Preview() | Picture():
                return asyncio.to_thread(self._show, answer)
            case Done(usage=usage, receipt=receipt):
                return self._tell("done", usage=ImageUsage.of(usage), receipt=ReceiptBody.of(receipt))
        return b""

    def _show(self, picture: Preview | Picture) -> bytes:
        size = (picture.of_width, picture.of_height) if isinstance(picture, Preview) else None
        common = {
            "index": picture.index,
            "b64_json": base64.b64encode(self.encoder.encode(picture, size)).decode(),
            "created_at": int(time.time()),
            "quality": "auto",
            "output_format": self.encoder.format,
            "background": "opaque",
        }
        if isinstance(picture, Preview):
            named = f"{picture.of_width}x{picture.of_height}"
            return self._tell("partial_image", partial_image_index=picture.number, size=named, **common)
        return self._tell("completed", seed=picture.seed, size=name_size(picture), **common)

    def _tell(self, event: str, **fields: Any) -> bytes:
        return frame_model(ImageEvent.model_validate({"type": f"{self.kind}.{event}", **fields}))


def name_size(picture: Picture) -> str:
    return f"{picture.width}x{picture.height}"
