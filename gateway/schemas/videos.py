"""`/v1/videos`: the request, a job, and lists of jobs."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from polymux.core.tasks import Film
from polymux.gateway.clips import ClipFormat
from polymux.gateway.filming import CANCELLED, Filming, Status
from polymux.gateway.schemas.base import WireAnswer, maybe
from polymux.gateway.schemas.images import MAX_SEED, PRESETS, SIZE, ImageQuality
from polymux.gateway.schemas.transcriptions import File, FormRequest

MAX_SECONDS = 60.0


class VideoRequest(FormRequest):
    """A form, as the official client sends it; JSON of the same fields is read too."""

    model: str
    prompt: str = Field(min_length=1, max_length=32_000)
    input_reference: File | None = Field(None, description="The picture that the clip begins with.")
    size: str | None = Field(None, pattern=SIZE, description="WIDTHxHEIGHT, exactly that size. Default: the model's.")
    seconds: float | None = Field(
        None, gt=0, le=MAX_SECONDS, description="The nearest length that the model makes is taken. Default: its own."
    )
    frames: int | None = Field(None, ge=1, description="Extension: exactly so many, in place of seconds.")
    fps: int | None = Field(None, ge=1, le=60, description="Extension: how fast it plays. Default: as it was trained.")
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    steps: int | None = Field(None, ge=1, description="Extension: denoising steps.")
    guidance: float | None = Field(None, ge=0, description="Extension: how closely to follow the prompt.")
    negative_prompt: str | None = Field(None, max_length=32_000, description="Extension.")
    quality: ImageQuality | None = Field(None, description="Extension, as for images.")
    output_format: ClipFormat = "mp4"
    user: str | None = None

    @field_validator("seconds", mode="before")
    @classmethod
    def _read_seconds(cls, value: Any) -> Any:
        if isinstance(value, str) and not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,4})?", value):
            raise ValueError("must be a number of seconds")
        return value

    @model_validator(mode="after")
    def _check_length(self) -> Self:
        if self.seconds is not None and self.frames is not None:
            raise ValueError("give seconds or frames")
        return self

    def ask(self, frames: int) -> Film:
        width, height = (None, None) if self.size in (None, "auto") else map(int, self.size.split("x"))
        return Film(
            prompt=self.prompt,
            negative=self.negative_prompt,
            width=width,
            height=height,
            frames=frames,
            steps=self.steps,
            guidance=self.guidance,
            seed=self.seed,
            source=None if self.input_reference is None else Path(self.input_reference.path).read_bytes(),
            quality=None if self.quality in (None, "auto") else PRESETS.get(self.quality, self.quality),
        )


class VideoError(WireAnswer):
    code: str
    message: str


class VideoBody(WireAnswer):
    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int
    created_at: int
    completed_at: int | None
    expires_at: int | None
    prompt: str
    seconds: str
    size: str
    error: VideoError | None
    remixed_from_video_id: None = None
    seed: int | None = maybe("Extension: what makes this clip again.")
    frames: int = Field(description="Extension.")
    fps: int = Field(description="Extension.")

    @classmethod
    def of(cls, job: Filming) -> VideoBody:
        error = None
        if job.cancelled:
            error = VideoError(code=CANCELLED, message="the video was cancelled")
        elif job.error is not None:
            error = VideoError(code=job.error.code or job.error.type, message=str(job.error))
        elif job.status == "failed":
            error = VideoError(code="stopped", message="the server was stopped")
        return cls(
            id=job.id,
            model=job.model,
            status=job.status,
            progress=job.progress,
            created_at=job.created,
            completed_at=job.completed,
            expires_at=job.expires,
            prompt=job.prompt,
            seconds=f"{job.frames / job.rate:.4g}",
            size=f"{job.size[0]}x{job.size[1]}",
            error=error,
            seed=job.seed,
            frames=job.frames,
            fps=job.rate,
        )


class VideoList(WireAnswer):
    object: Literal["list"] = "list"
    data: list[VideoBody]
    first_id: str | None
    last_id: str | None
    has_more: bool


class VideoDeleted(WireAnswer):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True
