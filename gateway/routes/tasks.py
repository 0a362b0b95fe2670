"""The routes that plugins bring with their tasks, as data, mounted like our own: limits, metrics, OpenAPI, errors.

What a plugin author must know:
- With `route.upload` the body is a multipart form: a file in that field, and the request's fields beside it.
- The body is checked by `route.request`, a pydantic model with a field `model`, or, without one, by the task's ask
  itself. The ask is made of the fields that both have. Fields that neither knows are refused.
- stream "none": the job answers once, then `Done`. The answer's fields are the body, with `usage` and `receipt`.
- stream "sse": each answer is one frame of JSON; `Done` becomes a frame with `usage` and `receipt`; then `[DONE]`.
- stream "bytes": each answer has `data: bytes`; the first one may have `media_type: str`.
"""

from __future__ import annotations

import logging
from collections.abc import Set
from typing import Annotated, Any, cast, get_origin

import msgspec
from pydantic import BaseModel, ConfigDict, WithJsonSchema, create_model
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.arrival import ArrivingFile
from polymux.core.errors import InternalError, InvalidRequest, PluginError, PolymuxError
from polymux.core.plugins import Plugins
from polymux.core.tasks import Done
from polymux.core.vocabulary import Route, Task
from polymux.gateway.answering import EventFrames, Headers, StreamResponse, WholeResponse, frame_json
from polymux.gateway.bodies import check_request, read_json
from polymux.gateway.forms import Form, FormResponse, read_form
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.state import gateway_of

logger = logging.getLogger("polymux.gateway")

KINDS = ("none", "sse", "bytes")
METHODS = ("GET", "POST")


def make_endpoints(plugins: Plugins, taken: Set[tuple[str, str]]) -> list[Endpoint]:
    """A task whose route is malformed, or taken by another, costs its plugin, which says why; the rest are served."""
    endpoints: list[Endpoint] = []
    used = set(taken)
    for task in plugins.tasks():
        if task.route is None:
            continue
        try:
            endpoint = make_endpoint(task, task.route)
            if endpoint.key in used:
                raise PluginError(f"{' '.join(endpoint.key)} is taken; choose another path")
        except PluginError as error:
            plugin = plugins.blame("tasks", task, error, task.name)
            logger.error("task %r is not served: %s", task.name, plugin.fault if plugin else error.message)
        else:
            used.add(endpoint.key)
            endpoints.append(endpoint)
    return endpoints


def _check_route(route: Route) -> None:
    if route.method.upper() not in METHODS:
        raise PluginError(f"method must be one of {METHODS}, not {route.method!r}")
    if not route.path.startswith("/"):
        raise PluginError(f"path must start with '/', not {route.path!r}")
    if route.upload is not None and route.method.upper() != "POST":
        raise PluginError("a route with an upload must be POST")
    if route.stream not in KINDS:
        raise PluginError(f"stream must be one of {KINDS}, not {route.stream!r}")
    for model in (route.request, route.response):
        if model is not None and not (isinstance(model, type) and issubclass(model, BaseModel)):
            raise PluginError("request and response must be pydantic models")


def make_endpoint(task: Task, route: Route) -> Endpoint:
    """Raises `PluginError` for a route that cannot be mounted."""
    _check_route(route)
    schema = cast(type[BaseModel], route.request or _describe_ask(task))
    method = route.method.upper()
    known = {field.name for field in msgspec.structs.fields(task.ask)}
    if "model" not in schema.model_fields:
        raise PluginError("its request needs a field 'model'")
    lost = (set(schema.model_fields) | ({route.upload} if route.upload else set())) - known - {"model"}
    if lost:
        raise PluginError(f"its ask has no field for {sorted(lost)} of its request")
    schema = _add_upload(schema, route.upload)

    def answer(request: Request, fields: dict[str, Any]) -> ASGIApp:
        model, ask = _make_ask(fields, schema, task)
        call = open_call(request, model, task.name, ask, weight=1)
        if route.stream == "none":
            return WholeResponse(call, WholeTask(route.response))
        return StreamResponse(call, TaskEvents() if route.stream == "sse" else TaskBytes())

    async def serve_task(request: Request) -> ASGIApp:
        if route.upload is None:
            return answer(request, await _read_fields(request, method))
        form = await read_form(request, gateway_of(request).settings.max_upload_bytes)
        try:
            return FormResponse(form, answer(request, _read_upload(form, route.upload, schema)))
        except BaseException:
            form.close()
            raise

    return Endpoint(
        method=method,
        path=route.path,
        summary=route.summary or task.name,
        tag="plugins",
        handle=serve_task,
        request=schema,
        request_media="application/json" if route.upload is None else "multipart/form-data",
        response=route.response if route.stream == "none" else None,
        stream=route.response if route.stream == "sse" else None,
        media={"none": "application/json", "sse": "text/event-stream", "bytes": "application/octet-stream"}[
            route.stream
        ],
        task=task.name,
        mode=route.stream,
        upload=route.upload,
    )


def _add_upload(schema: type[BaseModel], upload: str | None) -> type[BaseModel]:
    """The schema of a form: the request's own fields, and the file as the documents show one."""
    if upload is None:
        return schema
    kind = Annotated[str, WithJsonSchema({"type": "string", "format": "binary", "description": "A file."})]
    fields: dict[str, Any] = {upload: (kind, ...)}
    return create_model(f"{schema.__name__}Form", __base__=schema, **fields)


def _read_upload(form: Form, upload: str, schema: type[BaseModel]) -> dict[str, Any]:
    """The form's fields; in place of its file the path where that lies. Raises `InvalidRequest`."""
    lists = frozenset(name for name, field in schema.model_fields.items() if get_origin(field.annotation) is list)
    fields = form.gather(lists)
    for name, value in fields.items():
        if isinstance(value, ArrivingFile) and name != upload:
            raise InvalidRequest(f"{name[:200]!r} is no file: the file belongs into {upload!r}", param=name[:200])
    file = fields.get(upload)
    if not isinstance(file, ArrivingFile):
        message = f"{upload!r} is required: the file, with a file name"
        raise InvalidRequest(message, param=upload, code="missing_required_parameter")
    return {**fields, upload: file.path}


def _describe_ask(task: Task) -> type[BaseModel]:
    """A schema that only names the ask's fields: their types are checked when the ask is made."""
    fields: dict[str, Any] = {
        field.name: (Any, ... if field.required else None) for field in msgspec.structs.fields(task.ask)
    }
    fields["model"] = (str, ...)
    return create_model(f"{task.ask.__name__}Request", __config__=ConfigDict(extra="forbid"), **fields)


async def _read_fields(request: Request, method: str) -> dict[str, Any]:
    if method == "GET":
        return dict(request.query_params)
    data = await read_json(request, gateway_of(request).settings.max_body_bytes)
    if not isinstance(data, dict):
        raise InvalidRequest("the body must be a JSON object", code="invalid_json")
    return data


def _make_ask(fields: dict[str, Any], schema: type[BaseModel], task: Task) -> tuple[str, msgspec.Struct]:
    """The model's name and the task's ask. Raises `InvalidRequest` with the name of the field."""
    names = {field.alias or name for name, field in schema.model_fields.items()}
    for name in fields:
        if name not in names:
            message = f"{name[:200]!r} is not a parameter of this endpoint"
            raise InvalidRequest(message, param=name[:200], code="unsupported_parameter")
    checked = check_request(fields, schema).model_dump(exclude_unset=True)
    model = checked.pop("model", None)
    if not isinstance(model, str):
        raise InvalidRequest("'model' is required", param="model", code="missing_required_parameter")
    if any(field.name == "model" for field in msgspec.structs.fields(task.ask)):
        checked["model"] = model
    try:
        return model, msgspec.convert(checked, task.ask, strict=False)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        param = path.rstrip("`") or None
        raise InvalidRequest(message, param=param, code="invalid_value") from None


class WholeTask:
    """One answer is the body."""

    def __init__(self, response: type[BaseModel] | None) -> None:
        self.response = response
        self.body: dict[str, Any] | None = None

    def add(self, answer: msgspec.Struct) -> None:
        if self.body is not None:
            raise InternalError("a task that does not stream answered more than once")
        self.body = msgspec.to_builtins(answer)

    def finish(self, done: Done) -> bytes:
        if self.body is None:
            raise InternalError("a task that does not stream ended without an answer")
        body = self.body
        if self.response is not None:
            body = self.response.model_validate(body).model_dump(mode="json")
        return msgspec.json.encode({**body, **msgspec.to_builtins(done)})


class TaskEvents(EventFrames):
    """Each answer is a frame."""

    def write(self, answer: msgspec.Struct) -> bytes:
        return frame_json(msgspec.json.encode(answer))


class TaskBytes:
    """The answers' `data`, one after the other. A failure on the way cuts the connection: bytes have no error."""

    def __init__(self) -> None:
        self.headers: Headers = ((b"content-type", b"application/octet-stream"),)
        self._typed = False

    def write(self, answer: msgspec.Struct) -> bytes:
        if isinstance(answer, Done):
            return b""
        if not self._typed:
            self._typed = True
            media = getattr(answer, "media_type", "application/octet-stream")
            self.headers = ((b"content-type", media.encode("latin-1")),)
        return bytes(answer.data)  # type: ignore[attr-defined]

    def fail(self, error: PolymuxError) -> bytes:
        raise error

    def close(self) -> bytes:
        return b""
