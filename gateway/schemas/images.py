"""`/v1/images`: requests to paint, to edit and to vary, the answer and its events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, model_validator

from polymux.core.tasks import Paint
from polymux.core.vocabulary import Usage
from polymux.gateway.schemas.base import WireAnswer, WireRequest, maybe, only
from polymux.gateway.schemas.transcriptions import File, FormRequest
from polymux.gateway.schemas.usage import ReceiptBody

ImageFormat = Literal["png", "jpeg", "webp"]
ImageQuality = Literal["auto", "exact", "balanced", "fast", "high", "medium", "low", "hd", "standard"]

MAX_SEED = 2**53 - 1
"""What JSON's readers keep exact."""

SIZE = r"^(auto|[0-9]{1,6}x[0-9]{1,6})$"

PRESETS: dict[str | None, str] = {
    "high": "exact",
    "medium": "balanced",
    "low": "fast",
    "hd": "exact",
    "standard": "balanced",
}
"""What the protocol's names for a quality mean here."""

VARIATION = 0.6
"""How much of a picture a variation changes."""


class ImageFields(BaseModel):
    """What all three requests share."""

    model: str
    n: int | None = Field(None, ge=1, le=16, description="Default 1.")
    size: str | None = Field(
        None,
        pattern=SIZE,
        description="WIDTHxHEIGHT, exactly that size; sides the model cannot paint are refused. Default: the size of "
        "the image that is given, else the model's.",
    )
    seed: int | None = Field(
        None, ge=0, le=MAX_SEED - 16, description="Extension. Image k of n is the one of n=1 with seed + k."
    )
    steps: int | None = Field(None, ge=1, description="Extension: denoising steps.")
    guidance: float | None = Field(None, ge=0, description="Extension: how closely to follow the prompt.")
    negative_prompt: str | None = Field(
        None, max_length=32_000, description="Extension; a distilled model needs true_cfg_scale with it."
    )
    true_cfg_scale: float | None = Field(None, ge=1, description="Extension: classifier-free guidance.")
    quality: ImageQuality | None = Field(
        None, description="exact (high, hd) computes every step; balanced (medium, standard) and fast (low) reuse some."
    )
    strict: bool | None = Field(
        None, description="Extension: bitwise the same image whatever else runs; it shares no pass."
    )
    output_format: ImageFormat | None = Field(None, description="Default png.")
    output_compression: int | None = Field(None, ge=0, le=100, description="Quality of jpeg and webp. Default 100.")
    response_format: Literal["b64_json", "url"] | None = Field(
        None, description="Default b64_json. A url is served by this server for an hour."
    )
    stream: bool | None = Field(None, description="Progress of every image, then each image as an event.")
    partial_images: int | None = Field(
        None, ge=0, le=3, description="Previews of each image while it is made; with stream only."
    )
    user: str | None = None

    @model_validator(mode="after")
    def _check_options(self) -> Self:
        if self.output_compression is not None and self.output_format not in ("jpeg", "webp"):
            raise ValueError("output_compression needs output_format jpeg or webp")
        if self.partial_images and not self.stream:
            raise ValueError("partial_images needs stream")
        if self.stream and self.response_format == "url":
            raise ValueError("events carry images as b64_json")
        return self

    def paint(self, prompt: str) -> Paint:
        width, height = (None, None) if self.size in (None, "auto") else map(int, self.size.split("x"))
        return Paint(
            prompt=prompt,
            negative=self.negative_prompt,
            n=self.n or 1,
            width=width,
            height=height,
            steps=self.steps,
            guidance=self.guidance,
            true_scale=self.true_cfg_scale,
            seed=self.seed,
            previews=self.partial_images or 0,
            quality=None if self.quality in (None, "auto") else PRESETS.get(self.quality, self.quality),
            strict=bool(self.strict),
        )


class ImageRequest(ImageFields, WireRequest):
    prompt: str = Field(min_length=1, max_length=32_000)
    background: Annotated[str | None, only("auto", "opaque", reason="images are opaque")] = None
    moderation: Annotated[str | None, only("auto", "low", reason="nothing is moderated here")] = None
    style: Annotated[str | None, only(reason="the prompt decides the style")] = None

    def ask(self) -> Paint:
        return self.paint(self.prompt)


class ImageVariationRequest(ImageFields, FormRequest):
    image: File = Field(description="A picture file.")
    strength: float | None = Field(None, gt=0, le=1, description="Extension: how much may change. Default 0.6.")

    def ask(self) -> Paint:
        ask = self.paint("")
        ask.source = Path(self.image.path).read_bytes()
        ask.strength = VARIATION if self.strength is None else self.strength
        return ask


class ImageEditRequest(ImageFields, FormRequest):
    prompt: str = Field(min_length=1, max_length=32_000)
    image: File = Field(description="A picture file.")
    mask: File | None = Field(
        None, description="A picture file of the same size: what is transparent in it is painted anew, the rest kept."
    )
    strength: float | None = Field(
        None, gt=0, le=1, description="Extension: how much may change. Default: all inside a mask, 0.8 without one."
    )
    background: Annotated[str | None, only("auto", "opaque", reason="images are opaque")] = None
    input_fidelity: Annotated[str | None, only(reason="strength says how much may change")] = None

    def ask(self) -> Paint:
        ask = self.paint(self.prompt)
        ask.source = Path(self.image.path).read_bytes()
        ask.mask = None if self.mask is None else Path(self.mask.path).read_bytes()
        ask.strength = self.strength
        return ask


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
    b64_json: str | None = maybe()
    url: str | None = maybe()
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
    """`step` of `steps` in a progress event (an extension); a preview in a partial_image, `partial_image_index` of its
    image; the image in a completed, one for each of n; `usage` and `receipt` in the done at the end (an extension)."""

    type: Literal[
        "image_generation.progress",
        "image_generation.partial_image",
        "image_generation.completed",
        "image_generation.done",
        "image_edit.progress",
        "image_edit.partial_image",
        "image_edit.completed",
        "image_edit.done",
    ]
    index: int | None = maybe()
    step: int | None = maybe()
    steps: int | None = maybe()
    partial_image_index: int | None = maybe()
    b64_json: str | None = maybe()
    seed: int | None = maybe()
    created_at: int | None = maybe()
    size: str | None = maybe()
    quality: Literal["auto"] | None = maybe()
    output_format: ImageFormat | None = maybe()
    background: Literal["opaque"] | None = maybe()
    usage: ImageUsage | None = maybe()
    receipt: ReceiptBody | None = maybe()
