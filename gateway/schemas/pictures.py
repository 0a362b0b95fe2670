"""Parts of a message that are no words: pictures and clips, as chats carry them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from polymux.gateway.schemas.base import WireRequest

Detail = Literal["auto", "low", "high", "original"]

Url = Annotated[str, Field(min_length=1)]
"""A data URI; an address too, where the server fetches pictures."""


class TextPart(WireRequest):
    type: Literal["text"]
    text: str

    @field_validator("type", mode="before")
    @classmethod
    def _known(cls, value: Any) -> Any:
        if value in ("input_audio", "file", "video_url", "refusal"):
            raise PydanticCustomError("unsupported_parameter", "parts are of type text, image_url or video")
        return value

    def plain(self) -> dict[str, Any]:
        return {"type": "text", "text": self.text}


class ImageUrl(WireRequest):
    url: Url
    detail: Detail | None = Field(None, description="low: at most 512 pixels a side are looked at. Default auto.")


class ImagePart(WireRequest):
    type: Literal["image_url"]
    image_url: ImageUrl

    def plain(self) -> dict[str, Any]:
        return write_image(self.image_url.url, self.image_url.detail)


class VideoPart(WireRequest):
    """Extension. A clip as pictures, with the seconds at which each is seen, or so many to a second."""

    type: Literal["video"]
    video: list[Url] = Field(min_length=1, max_length=256)
    timestamps: list[Annotated[float, Field(ge=0)]] | None = None
    fps: float | None = Field(None, gt=0, le=1000, description="Default 2.")

    @model_validator(mode="after")
    def _one_time_each(self) -> VideoPart:
        times = self.timestamps
        if times is not None and (len(times) != len(self.video) or times != sorted(times)):
            raise ValueError("timestamps must be one a frame, in order")
        if times is not None and self.fps is not None:
            raise ValueError("give timestamps or fps, not both")
        return self

    def plain(self) -> dict[str, Any]:
        return {"type": "video", "frames": list(self.video), "timestamps": self.timestamps, "fps": self.fps}


def write_image(url: str, detail: str | None = None) -> dict[str, Any]:
    """A picture as tasks carry it."""
    return {"type": "image_url", "image_url": {"url": url, "detail": detail or "auto"}}


def part_kind(value: Any) -> str | None:
    """The tag of a part: what is neither picture nor clip is taken for text, and told so."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"image_url": "<image>", "video": "<video>"}.get(str(kind), "<words>")


def join_words(parts: list[dict[str, Any]]) -> str | list[dict[str, Any]]:
    """Parts that are words alone are one text."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts
