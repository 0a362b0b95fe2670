"""`/v1/videos`: clips are made as jobs; their state, their files, and their end."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import FileResponse, Response
from starlette.types import ASGIApp

from polymux.core.errors import InvalidRequest, NotFound
from polymux.gateway.answering import encode_model
from polymux.gateway.bodies import check_request, read_json
from polymux.gateway.clips import check_clip
from polymux.gateway.filming import Filming, new_id
from polymux.gateway.forms import Form, read_form
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.videos import VideoBody, VideoDeleted, VideoList, VideoRequest
from polymux.gateway.state import gateway_of

PATIENCE = 5.0
"""Seconds that a creation waits for what is wrong with it; one that must queue longer is told later."""

MOST_LISTED = 100


async def create_video(request: Request) -> ASGIApp:
    settings = gateway_of(request).settings
    form = None
    if request.headers.get("content-type", "").startswith("multipart/"):
        form = await read_form(request, settings.max_upload_bytes)
    try:
        return await _create(request, form)
    finally:
        if form is not None:
            form.close()


async def _create(request: Request, form: Form | None) -> ASGIApp:
    gateway = gateway_of(request)
    values: Any
    if form is None:
        values = await read_json(request, gateway.settings.max_body_bytes)
    else:
        values = form.gather(VideoRequest.lists)
    body = check_request(values, VideoRequest)
    facts = gateway.service.find(body.model).describe()
    rate = body.fps or int(facts.get("frames_per_second", 16))
    apart = int(facts.get("frames_apart", 1))
    frames = body.frames or int(facts.get("default_frames", 1))
    if body.seconds is not None:
        frames = max(round(body.seconds * rate / apart), 0) * apart + 1
    ask = await asyncio.to_thread(body.ask, frames)
    width, height = (int(side) for side in str(facts.get("default_size", "0x0")).split("x"))
    size = (ask.width or width, ask.height or height)
    check_clip(*size, body.output_format)
    call = open_call(request, body.model, "video", ask, weight=1)
    job = Filming(new_id(), call.model, body.prompt, size, frames, rate, body.output_format, int(time.time()))
    await gateway.films.start(call, job, PATIENCE)
    return _answer(VideoBody.of(job))


async def list_videos(request: Request) -> ASGIApp:
    query = request.query_params
    order, after, limit = query.get("order", "desc"), query.get("after"), query.get("limit", "20")
    if order not in ("asc", "desc"):
        raise InvalidRequest("order is asc or desc", param="order")
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:4]) <= MOST_LISTED):
        raise InvalidRequest(f"limit is from 1 to {MOST_LISTED}", param="limit")
    jobs = gateway_of(request).films.list()
    if order == "desc":
        jobs.reverse()
    if after is not None:
        ids = [job.id for job in jobs]
        if after not in ids:
            raise NotFound(f"there is no video {after[:100]!r}", param="after")
        jobs = jobs[ids.index(after) + 1 :]
    page = jobs[: int(limit)]
    ends = (page[0].id, page[-1].id) if page else (None, None)
    body = VideoList(
        data=[VideoBody.of(job) for job in page], first_id=ends[0], last_id=ends[1], has_more=len(jobs) > len(page)
    )
    return Response(encode_model(body), media_type="application/json")


async def show_video(request: Request) -> ASGIApp:
    return _answer(VideoBody.of(_find(request)))


async def show_content(request: Request) -> ASGIApp:
    job = _find(request)
    variant = request.query_params.get("variant", "video")
    if variant not in ("video", "thumbnail"):
        raise InvalidRequest("variant is video or thumbnail", param="variant")
    if job.status != "completed":
        raise InvalidRequest(f"the video is {job.status.replace('_', ' ')}", code="video_not_ready")
    item = gateway_of(request).shelf.find(job.files[variant])
    if item is None:
        raise NotFound("the video's time is over")
    return FileResponse(item.path, media_type=item.media)


async def cancel_video(request: Request) -> ASGIApp:
    return _answer(VideoBody.of(gateway_of(request).films.cancel(request.path_params["video_id"])))


async def delete_video(request: Request) -> ASGIApp:
    id = request.path_params["video_id"]
    gateway_of(request).films.remove(id)
    return Response(encode_model(VideoDeleted(id=id)), media_type="application/json")


def _find(request: Request) -> Filming:
    return gateway_of(request).films.find(request.path_params["video_id"])


def _answer(body: VideoBody) -> Response:
    return Response(encode_model(body), media_type="application/json")


ENDPOINTS = (
    Endpoint(
        method="POST",
        path="/v1/videos",
        summary="Begin to make a clip of a text, or of a text and a picture",
        tag="videos",
        handle=create_video,
        request=VideoRequest,
        request_media="multipart/form-data",
        response=VideoBody,
    ),
    Endpoint(
        method="GET",
        path="/v1/videos",
        summary="Clips that are made or being made",
        tag="videos",
        handle=list_videos,
        response=VideoList,
    ),
    Endpoint(
        method="GET",
        path="/v1/videos/{video_id}",
        summary="How far a clip is",
        tag="videos",
        handle=show_video,
        response=VideoBody,
    ),
    Endpoint(
        method="GET",
        path="/v1/videos/{video_id}/content",
        summary="The clip's file, or its first frame",
        tag="videos",
        handle=show_content,
        media="video/mp4",
    ),
    Endpoint(
        method="POST",
        path="/v1/videos/{video_id}/cancel",
        summary="Stop making a clip",
        tag="videos",
        handle=cancel_video,
        response=VideoBody,
    ),
    Endpoint(
        method="DELETE",
        path="/v1/videos/{video_id}",
        summary="Forget a clip, and stop making it",
        tag="videos",
        handle=delete_video,
        response=VideoDeleted,
    ),
)
