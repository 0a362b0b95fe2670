"""`POST /v1/images/generations`: the request, the answer and its events."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from polymux.core.tasks import Paint
from polymux.core.vocabulary import Usage
from polymux.gateway.schemas.base import WireAnswer, WireRequest, maybe, only
from polymux.gateway.schemas.usage import ReceiptBody

ImageFormat = Literal["png", "jpeg", "webp"]

MAX_SEED = 2**53 - 1
"""What JSON's readers keep exact."""


class ImageRequest(WireRequest):
    model: str
    prompt: str = Field(min_length=1, max_length=32_000)
    n: int | None = Field(None, ge=1, le=16, description="Default 1.")
    size: str | None = Field(
        None,
        pattern=r"^(auto|[0-9]{1,6}x[0-9]{1,6})$",
        description="WIDTHxHEIGHT, exactly that size; sides the model cannot paint are refused. Default: the model's.",
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED - 16, description="Extension. Image k of n is the one of n=1 with seed + k."
    )
    steps: int | None = Field(None, ge=1, description="Extension: denoising steps.")
    guidance: float | None = Field(None, ge=0, description="Extension: the scale a distilled model reads.")
    negative_prompt: str | None = Field(None, max_length=32_000, description="Extension; needs true_cfg_scale.")
    true_cfg_scale: float | None = Field(None, ge=1, description="Extension: classifier-free guidance.")
    output_format: ImageFormat | None = Field(None, description="Default png.")
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp. Default 100.")
    response_format: Annotated[str | None, only("b64_json", reason="images are answered as b64_json")] = None
    stream: bool | None = Field(None, description="Progress of every image, then each image as an event.")
    partial_images: Annotated[int | None, only(0, reason="no previews are served")] = None
    background: Annotated[str | None, only("auto", "opaque", reason="images are opaque")] = None
    moderation: Annotated[str | None, only("auto", "low", reason="nothing is moderated here")] = None
    quality: Annotated[str | None, only("auto", reason="steps decide the quality")] = None
    style: Annotated[str | None, only(reason="the prompt decides the style")] = None
    user: str | None = None

    @model_validator(mode="after")
    def _check_compression(self) -> Self:
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise ValueError("output_compression needs output_format jpeg or webp")
        return self

    def ask(self) -> Paint:
        width, height = (None, None) if self.size in (None, "auto") else map(int, self.size.split("x"))
        return Paint(
            prompt=self.prompt,
            negative=self.negative_prompt,
            n=self.n or 1,
            width=width,
            height=height,
            steps=self.steps,
            guidance=self.guidance,
            true_scale=self.true_cfg_scale,
            seed=self.seed,
        )


class ImageInputDetails(WireAnswer):
    text_tokens: int
    image_tokens: int = 0


class ImageUsage(WireAnswer):
    """Tokens of the text that were read, and of the pictures that were made."""

    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_tokens_details: ImageInputDetails

    @classmethod
    def of(cls, usage: Usage) -> ImageUsage:
        return cls(
            input_tokens=usage.input_tokens,
            output_tokens=usage.output_tokens,
            total_tokens=usage.input_tokens + usage.output_tokens,
            input_tokens_details=ImageInputDetails(text_tokens=usage.input_tokens),
        )


class ImageBody(WireAnswer):
    b64_json: str
    seed: int = Field(description="Extension: what makes this image again.")


class ImagesAnswer(WireAnswer):
    created: int
    data: list[ImageBody]
    size: str
    output_format: ImageFormat
    background: Literal["opaque"] = "opaque"
    usage: ImageUsage
    receipt: ReceiptBody


class ImageEvent(WireAnswer):
    """`step` of `steps` in an image_generation.progress (an extension); the image in an image_generation.completed,
    one for each of n; `usage` and `receipt` in the image_generation.done at the end (an extension)."""

    type: Literal["image_generation.progress", "image_generation.completed", "image_generation.done"]
    index: int | None = maybe()
    step: int | None = maybe()
    steps: int | None = maybe()
    b64_json: str | None = maybe()
    seed: int | None = maybe()
    created_at: int | None = maybe()
    size: str | None = maybe()
    output_format: ImageFormat | None = maybe()
    background: Literal["opaque"] | None = maybe()
    usage: ImageUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
