"""Multipart bodies: bounded while they arrive; fields stay in memory, the one file goes to disk as it comes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from polymux.core.arrival import ArrivingFile
from polymux.core.errors import InvalidRequest, Overloaded, TooLarge, UnsupportedMedia

MAX_FIELDS = 64
MAX_FIELD_BYTES = 64 << 10
BATCH = 256 << 10
"""Bytes that are parsed and written together, on a thread."""


@dataclass
class Form:
    """What a body said. A name may come several times."""

    fields: list[tuple[str, str]] = field(default_factory=list)
    uploads: list[tuple[str, ArrivingFile]] = field(default_factory=list)

    def close(self) -> None:
        for _, upload in self.uploads:
            upload.close()

    def gather(self, lists: frozenset[str]) -> dict[str, Any]:
        """Name to value. `lists` may come several times, with brackets behind the name or without; `name[key]` is a
        key of an object. Raises `InvalidRequest` for anything else that comes twice."""
        values: dict[str, Any] = {}
        for name, value in [*self.fields, *self.uploads]:
            base, bracket, key = name.removesuffix("]").partition("[")
            if base in lists and not key:
                values.setdefault(base, []).append(value)
            elif bracket and key and isinstance(values.setdefault(base, {}), dict):
                values[base][key] = value
            elif name in values:
                raise InvalidRequest(f"{name[:200]!r} is given more than once", param=name[:200])
            else:
                values[name] = value
        return values


class FormResponse:
    """Keeps a form's file until its answer is sent, or its client has left."""

    def __init__(self, form: Form, response: ASGIApp) -> None:
        self.form = form
        self.response = response

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.response(scope, receive, send)
        finally:
            self.form.close()


async def read_form(request: Request, limit: int, *, files: int = 1) -> Form:
    """The whole body, with so many `files` at most; the caller closes it. Keeps nothing of a body that exceeds `limit`
    bytes or is malformed.

    Raises `UnsupportedMedia`, `TooLarge`, `InvalidRequest`.
    """
    stream = FormStream(request, limit, files=files)
    await stream.read()
    return stream.form


class FormStream:
    """A body that is read in two halves, if need be. The caller closes its `form`."""

    def __init__(self, request: Request, limit: int, *, files: int = 1) -> None:
        """Raises `UnsupportedMedia`, and `TooLarge` for a body that says it is."""
        self._parts = _Parts(_read_boundary(request), files)
        self.form = self._parts.form
        self.complete = False
        self._limit = limit
        self._received = 0
        self._pieces = request.stream()
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > limit:
            raise _too_large(limit)

    async def read(self, enough: Callable[[Form], bool] | None = None) -> None:
        """Read on, to the end or until there is `enough`. Raises as `read_form` does; the form is closed then."""
        batch = bytearray()
        try:
            async for data in self._pieces:
                self._received += len(data)
                if self._received > self._limit:
                    raise _too_large(self._limit)
                batch += data
                if len(batch) >= BATCH:
                    await asyncio.to_thread(self._parts.feed, bytes(batch))
                    batch.clear()
                    if enough is not None and enough(self.form):
                        return
            await asyncio.to_thread(self._parts.feed, bytes(batch))
            self._parts.finish()
            self.complete = True
        except BaseException:
            self.form.close()
            raise


class _Parts:
    """Takes a body piece by piece and sorts its parts into a form."""

    def __init__(self, boundary: bytes, files: int) -> None:
        self._files = files
        self.form = Form()
        self._ended = False
        self._headers: dict[bytes, bytes] = {}
        self._header = (b"", b"")
        self._name = ""
        self._text = bytearray()
        self._upload: ArrivingFile | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._headers.clear,
                "on_header_begin": self._begin_header,
                "on_header_field": lambda data, start, end: self._extend_header(data[start:end], b""),
                "on_header_value": lambda data, start, end: self._extend_header(b"", data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_body,
                "on_part_data": lambda data, start, end: self._extend_body(data[start:end]),
                "on_part_end": self._end_body,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> None:
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise InvalidRequest(f"the body is not valid multipart/form-data: {error}", code="invalid_form") from None
        except OSError as error:
            raise Overloaded(f"there is no room for uploads ({error.strerror})") from error

    def finish(self) -> None:
        if not self._ended:
            raise InvalidRequest("the body ends before its last boundary", code="invalid_form")

    def _begin_header(self) -> None:
        self._header = (b"", b"")

    def _extend_header(self, name: bytes, value: bytes) -> None:
        self._header = (self._header[0] + name, self._header[1] + value)

    def _end_header(self) -> None:
        self._headers[self._header[0].lower()] = self._header[1]

    def _begin_body(self) -> None:
        if len(self.form.fields) + len(self.form.uploads) >= MAX_FIELDS:
            raise InvalidRequest(f"the form has more than {MAX_FIELDS} fields", code="invalid_form")
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name")
        if not name:
            raise InvalidRequest("a part of the form has no name", code="invalid_form")
        self._name = name.decode(errors="replace")
        self._text.clear()
        self._upload = None
        if b"filename" in options:
            if len(self.form.uploads) >= self._files:
                most = "one file" if self._files == 1 else f"{self._files} files"
                raise InvalidRequest(f"only {most} can be sent", param=self._name[:200], code="invalid_form")
            self._upload = ArrivingFile()
            self.form.uploads.append((self._name, self._upload))

    def _extend_body(self, data: bytes) -> None:
        if self._upload is not None:
            self._upload.write(data)
            return
        self._text += data
        if len(self._text) > MAX_FIELD_BYTES:
            name = self._name[:200]
            raise InvalidRequest(f"{name!r} is longer than {MAX_FIELD_BYTES} bytes", param=name)

    def _end_body(self) -> None:
        if self._upload is not None:
            self._upload.finish()
        else:
            try:
                self.form.fields.append((self._name, self._text.decode()))
            except UnicodeDecodeError:
                name = self._name[:200]
                raise InvalidRequest(f"{name!r} is not valid UTF-8", param=name, code="invalid_form") from None

    def _end(self) -> None:
        self._ended = True


def _read_boundary(request: Request) -> bytes:
    media, options = parse_options_header(request.headers.get("content-type", ""))
    if media != b"multipart/form-data" or not options.get(b"boundary"):
        raise UnsupportedMedia("content-type must be multipart/form-data with a boundary")
    if request.headers.get("content-encoding", "identity").lower() != "identity":
        raise UnsupportedMedia("a compressed body is not accepted here")
    return options[b"boundary"]


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body exceeds the limit of {limit} bytes")
