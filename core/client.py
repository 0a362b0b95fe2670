"""A client for every task that a server offers, a stranger's too: it learns routes and streams from the server.

client = Client("http://127.0.0.1:8000")
client.tasks()                                            # what plugins brought
client.ask("count", model="m", text="one two")            # {"words": 2, "usage": ..., "receipt": ...}
for event in client.stream("tick", model="m", text="one two"): ...
client.ask("words", model="m", upload="speech.wav")       # a file, where the task takes one

Chat, embeddings, speech and pictures are OpenAI's routes: use the `openai` package for those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from polymux.core.errors import InvalidRequest, PolymuxError

DONE = "[DONE]"


@dataclass(frozen=True)
class TaskRoute:
    """Where one task is reached. `stream`: none, sse or bytes; `upload`: the field that carries a file."""

    task: str
    method: str
    path: str
    stream: str
    upload: str | None
    summary: str


class Client:
    """Talks to one server. `transport` takes the place of the network (`httpx`)."""

    def __init__(
        self,
        base_url: str = "http://127.0.0.1:8000",
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._http = httpx.Client(base_url=base_url, headers=headers, timeout=timeout, transport=transport)
        self._routes: dict[str, TaskRoute] | None = None

    def tasks(self) -> list[TaskRoute]:
        """The tasks that plugins brought, by name."""
        if self._routes is None:
            found = {}
            document = _check(self._http.get("/openapi.json")).json()
            for path, methods in document["paths"].items():
                for method, operation in methods.items():
                    facts = operation.get("x-polymux")
                    if facts is not None:
                        found[facts["task"]] = TaskRoute(
                            facts["task"], method.upper(), path, facts["stream"], facts["upload"], operation["summary"]
                        )
            self._routes = found
        return [self._routes[name] for name in sorted(self._routes)]

    def ask(self, task: str, *, upload: str | Path | None = None, **fields: Any) -> dict[str, Any]:
        """The answer of a task that does not stream. Raises `PolymuxError` with the server's status and code."""
        route = self._find(task, "none")
        answer: dict[str, Any] = _check(self._http.send(self._request(route, upload, fields))).json()
        return answer

    def stream(self, task: str, *, upload: str | Path | None = None, **fields: Any) -> Iterator[dict[str, Any]]:
        """The frames of a task that streams events, as they arrive; the last one has `usage` and `receipt`."""
        response = self._http.send(self._request(self._find(task, "sse"), upload, fields), stream=True)
        with _closing(response):
            for line in response.iter_lines():
                if not line.startswith("data: ") or line == f"data: {DONE}":
                    continue
                frame = json.loads(line.removeprefix("data: "))
                if isinstance(frame.get("error"), dict):
                    raise _read_error(response.status_code, frame["error"])
                yield frame

    def read(self, task: str, *, upload: str | Path | None = None, **fields: Any) -> Iterator[bytes]:
        """The bytes of a task that streams bytes, as they arrive."""
        response = self._http.send(self._request(self._find(task, "bytes"), upload, fields), stream=True)
        with _closing(response):
            yield from response.iter_bytes()

    def close(self) -> None:
        """Give up the connections."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _find(self, task: str, stream: str) -> TaskRoute:
        known = {route.task: route for route in self.tasks()}
        if task not in known:
            names = ", ".join(known) or "none"
            raise InvalidRequest(f"this server has no task {task!r}; plugins brought: {names}", param="task")
        verbs = {"none": "ask", "sse": "stream", "bytes": "read"}
        if known[task].stream != stream:
            way = known[task].stream
            says = {"none": "does not stream", "sse": "streams events", "bytes": "streams bytes"}[way]
            raise InvalidRequest(f"{task!r} {says}: use `{verbs[way]}`")
        return known[task]

    def _request(self, route: TaskRoute, upload: str | Path | None, fields: dict[str, Any]) -> httpx.Request:
        if (route.upload is None) != (upload is None):
            raise InvalidRequest(f"{route.task!r} takes {'no' if route.upload is None else 'a'} file", param="upload")
        if route.method == "GET":
            return self._http.build_request("GET", route.path, params=fields)
        if route.upload is None or upload is None:
            return self._http.build_request("POST", route.path, json=fields)
        file = Path(upload)
        return self._http.build_request(
            "POST", route.path, data=fields, files={route.upload: (file.name, file.read_bytes())}
        )


class _closing:
    """A streamed response that is checked when it begins and closed when it ends."""

    def __init__(self, response: httpx.Response) -> None:
        self.response = response

    def __enter__(self) -> httpx.Response:
        if self.response.is_error:
            self.response.read()
        return _check(self.response)

    def __exit__(self, *_: object) -> None:
        self.response.close()


def _check(response: httpx.Response) -> httpx.Response:
    if not response.is_error:
        return response
    try:
        error = response.json()["error"]
    except (ValueError, KeyError, TypeError):
        error = {"message": f"the server answered {response.status_code} without saying why"}
    raise _read_error(response.status_code, error)


def _read_error(status: int, error: dict[str, Any]) -> PolymuxError:
    wire = {"status": status if status >= 400 else 500, "type": error.get("type", "server_error")}
    return PolymuxError.from_wire({**error, **wire})
