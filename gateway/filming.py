"""Video jobs: made in the background, whoever stays or leaves; asked about, fetched, cancelled and deleted by id."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Literal

from polymux.core.errors import NotFound, Overloaded, PolymuxError
from polymux.core.tasks import Clip, Progress
from polymux.gateway.call import Call
from polymux.gateway.clips import MEDIA, ClipFormat, encode_clip, encode_thumbnail
from polymux.gateway.errors import wrap_unexpected
from polymux.gateway.shelf import Shelf

KEPT = 1000
"""Jobs that are remembered; the oldest that have ended go first."""

ENCODED = 97
"""Percent that denoising is counted as; the rest is decoding and encoding."""

CANCELLED = "cancelled"

Status = Literal["queued", "in_progress", "completed", "failed"]


@dataclass(eq=False)
class Filming:
    """One job. `frames`, `rate` and `size` are what was asked for, then what was made."""

    id: str
    model: str
    prompt: str
    size: tuple[int, int]
    frames: int
    rate: int
    format: ClipFormat
    created: int
    status: Status = "queued"
    progress: int = 0
    completed: int | None = None
    expires: int | None = None
    seed: int | None = None
    error: PolymuxError | None = None
    cancelled: bool = False
    files: dict[str, str] = field(default_factory=dict)
    """By variant, names on the shelf."""
    task: asyncio.Task[None] | None = None

    @property
    def over(self) -> bool:
        return self.status in ("completed", "failed")


class FilmJobs:
    """All jobs of one gateway."""

    def __init__(self, shelf: Shelf) -> None:
        self._shelf = shelf
        self._jobs: OrderedDict[str, Filming] = OrderedDict()

    async def start(self, call: Call, job: Filming, patience: float) -> None:
        """Begin, and wait a little for what is wrong with the request. Raises that as `PolymuxError`."""
        self._tidy()
        if len(self._jobs) >= KEPT:
            raise Overloaded(f"{KEPT} videos are being made already")
        accepted = asyncio.Event()
        job.task = asyncio.create_task(self._make(call, job, accepted), name=f"video {job.id}")
        self._jobs[job.id] = job
        try:
            await asyncio.wait_for(accepted.wait(), patience)
        except TimeoutError:
            return  # it waits for its turn
        except asyncio.CancelledError:
            self.remove(job.id)
            raise
        if job.error is not None:
            del self._jobs[job.id]
            raise job.error

    def find(self, id: str) -> Filming:
        """Raises `NotFound`."""
        self._tidy()
        job = self._jobs.get(id)
        if job is None:
            raise NotFound(f"there is no video {id[:100]!r}, or no longer", param="video_id")
        return job

    def list(self) -> list[Filming]:
        """Oldest first."""
        self._tidy()
        return list(self._jobs.values())

    def cancel(self, id: str) -> Filming:
        """Stop a job; the engine is free within a step. One that is over stays as it is. Raises `NotFound`."""
        job = self.find(id)
        if job.task is not None and not job.over:
            job.cancelled = True
            job.task.cancel()
            job.status = "failed"
        return job

    def remove(self, id: str) -> None:
        """Cancel and forget a job, and its files. Raises `NotFound`."""
        job = self.cancel(id)
        self._jobs.pop(id, None)
        for name in job.files.values():
            self._shelf.remove(name)

    async def _make(self, call: Call, job: Filming, accepted: asyncio.Event) -> None:
        try:
            async with call.answers() as answers:
                job.status = "in_progress"
                accepted.set()
                await self._follow(answers, job)
        except PolymuxError as error:
            job.status, job.error = "failed", error
        except asyncio.CancelledError:
            job.status = "failed"  # at shutdown, or because somebody said so
            raise
        except Exception as error:
            job.status, job.error = "failed", wrap_unexpected(error)
        finally:
            job.completed = int(time.time())
            accepted.set()

    async def _follow(self, answers: AsyncIterator[object], job: Filming) -> None:
        clip: Clip | None = None
        async for answer in answers:
            if isinstance(answer, Progress):
                job.progress = max(job.progress, ENCODED * answer.step // answer.steps)
            elif isinstance(answer, Clip):
                clip = answer
        if clip is None:
            raise RuntimeError("the job ended without its clip")
        frames = clip.frames
        job.seed, job.frames, job.size = clip.seed, len(frames), (frames.shape[2], frames.shape[1])
        names = await asyncio.to_thread(self._store, job, clip)
        if job.cancelled:
            for name in names.values():
                self._shelf.remove(name)
            return
        job.files, job.progress, job.status = names, 100, "completed"
        job.expires = int(time.time() + self._shelf.lifetime)

    def _store(self, job: Filming, clip: Clip) -> dict[str, str]:
        file = encode_clip(clip.frames, job.rate, job.format)
        return {
            "video": self._shelf.put(file, MEDIA[job.format], f".{job.format}"),
            "thumbnail": self._shelf.put(encode_thumbnail(clip.frames), "image/webp", ".webp"),
        }

    def _tidy(self) -> None:
        now = time.time()
        for id, job in list(self._jobs.items()):
            stale = job.completed is not None and now > job.completed + self._shelf.lifetime
            if job.over and (stale or len(self._jobs) > KEPT):
                self._jobs.pop(id)
                for name in job.files.values():
                    self._shelf.remove(name)


def new_id() -> str:
    return f"video_{secrets.token_hex(16)}"
