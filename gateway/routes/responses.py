"""`POST /v1/responses`: a chat, told as items."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.types import ASGIApp

from polymux.core.errors import PolymuxError
from polymux.core.tasks import CallDelta, ChoiceEnded, Done, TextDelta, ThoughtDelta
from polymux.gateway.answering import EVENTS, StreamResponse, WholeResponse, encode_model
from polymux.gateway.bodies import read_request
from polymux.gateway.ids import draw_id
from polymux.gateway.routes.endpoint import Endpoint
from polymux.gateway.routes.opening import open_call
from polymux.gateway.schemas.response import (
    Incomplete,
    OutputCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    OutputThought,
    ResponseBody,
    ResponseEvent,
    ResponseFailure,
    ResponseUsage,
)
from polymux.gateway.schemas.responses import ResponseRequest
from polymux.gateway.schemas.usage import ReceiptBody
from polymux.gateway.state import gateway_of


async def respond(request: Request) -> ASGIApp:
    body = await read_request(request, ResponseRequest, gateway_of(request).settings.max_body_bytes)
    call = open_call(request, body.model, "chat", body.ask(), weight=1)
    growing = GrowingResponse(open_body(call.model, body))
    return StreamResponse(call, ResponseStream(growing)) if body.stream else WholeResponse(call, growing)


ENDPOINT = Endpoint(
    method="POST",
    path="/v1/responses",
    summary="Continue a conversation, told as items",
    tag="text",
    handle=respond,
    request=ResponseRequest,
    response=ResponseBody,
    stream=ResponseEvent,
)


def open_body(model: str, asked: ResponseRequest) -> ResponseBody:
    text = asked.text.model_dump(exclude_none=True, by_alias=True) if asked.text is not None else {}
    choice: Any = "auto" if asked.tool_choice is None else asked.tool_choice
    return ResponseBody(
        id=f"resp_{draw_id()}",
        created_at=int(time.time()),
        model=model,
        instructions=asked.instructions,
        max_output_tokens=asked.max_output_tokens,
        parallel_tool_calls=asked.parallel_tool_calls is not False,
        reasoning={"effort": asked.reasoning.effort if asked.reasoning is not None else None, "summary": None},
        temperature=1.0 if asked.temperature is None else asked.temperature,
        text={"format": {"type": "text"}, **text},
        tool_choice=choice if isinstance(choice, str) else choice.model_dump(),
        tools=[
            {"parameters": None, "strict": None, **tool.model_dump(exclude_none=True)} for tool in asked.tools or ()
        ],
        top_p=1.0 if asked.top_p is None else asked.top_p,
        metadata=asked.metadata or {},
    )


class GrowingResponse:
    """The response as it grows, and the events that say so. A new item begins where the kind of answer changes."""

    def __init__(self, body: ResponseBody) -> None:
        self.body = body
        self._cut = False

    def add(self, answer: msgspec.Struct) -> None:
        for _ in self.grow(answer):
            pass

    def finish(self, done: Done) -> bytes:
        for _ in self.complete(done):
            pass
        return encode_model(self.body)

    def grow(self, answer: msgspec.Struct) -> Iterator[dict[str, Any]]:
        if isinstance(answer, ChoiceEnded):
            self._cut = answer.reason == "length"
        elif isinstance(answer, TextDelta) and answer.text:
            yield from self._turn_to(OutputMessage)
            yield from self._extend("output_text", answer.text, logprobs=[])
        elif isinstance(answer, ThoughtDelta) and answer.text:
            yield from self._turn_to(OutputReasoning)
            yield from self._extend("reasoning_text", answer.text)
        elif isinstance(answer, CallDelta):
            yield from self._call(answer)

    def complete(self, done: Done) -> Iterator[dict[str, Any]]:
        yield from self._close()
        self.body.status = "incomplete" if self._cut else "completed"
        if self._cut:
            self.body.incomplete_details = Incomplete(reason="max_output_tokens")
        self.body.usage = ResponseUsage.of(done.usage)
        self.body.receipt = ReceiptBody.of(done.receipt)
        yield {"type": f"response.{self.body.status}", "response": self.body.model_dump(mode="json")}

    @property
    def _item(self) -> OutputItem | None:
        """The item that grows."""
        last = self.body.output[-1] if self.body.output else None
        return last if last is not None and last.status == "in_progress" else None

    @property
    def _place(self) -> dict[str, Any]:
        return {"item_id": self.body.output[-1].id, "output_index": len(self.body.output) - 1}

    def _turn_to(self, kind: type[OutputMessage] | type[OutputReasoning]) -> Iterator[dict[str, Any]]:
        """Go on with an item of that kind: the one that grows, or a new one."""
        if isinstance(self._item, kind):
            return
        yield from self._close()
        if kind is OutputMessage:
            item: OutputMessage | OutputReasoning = OutputMessage(id=f"msg_{draw_id()}")
            yield self._append(item)
            item.content.append(OutputText())
        else:
            item = OutputReasoning(id=f"rs_{draw_id()}")
            yield self._append(item)
            item.content.append(OutputThought())
        part = item.content[0].model_dump(mode="json")
        yield {"type": "response.content_part.added", **self._place, "content_index": 0, "part": part}

    def _append(self, item: OutputItem) -> dict[str, Any]:
        self.body.output.append(item)
        place = len(self.body.output) - 1
        return {"type": "response.output_item.added", "output_index": place, "item": item.model_dump(mode="json")}

    def _extend(self, kind: str, text: str, **more: Any) -> Iterator[dict[str, Any]]:
        item = self._item
        if isinstance(item, OutputMessage | OutputReasoning):
            item.content[0].text += text
            yield {"type": f"response.{kind}.delta", **self._place, "content_index": 0, "delta": text, **more}

    def _call(self, delta: CallDelta) -> Iterator[dict[str, Any]]:
        if delta.id is not None:
            yield from self._close()
            yield self._append(OutputCall(id=f"fc_{draw_id()}", call_id=delta.id, name=delta.name or ""))
        item = self._item
        if isinstance(item, OutputCall) and delta.arguments:
            item.arguments += delta.arguments
            yield {"type": "response.function_call_arguments.delta", **self._place, "delta": delta.arguments}

    def _close(self) -> Iterator[dict[str, Any]]:
        """The item that grows is complete, or as much of it as there will be."""
        item = self._item
        if item is None:
            return
        if isinstance(item, OutputCall):
            done = {"type": "response.function_call_arguments.done", "name": item.name, "arguments": item.arguments}
            yield {**done, **self._place}
        else:
            part, kind = item.content[0], "output_text" if isinstance(item, OutputMessage) else "reasoning_text"
            more = {"logprobs": []} if isinstance(item, OutputMessage) else {}
            place = {**self._place, "content_index": 0}
            yield {"type": f"response.{kind}.done", **place, "text": part.text, **more}
            yield {"type": "response.content_part.done", **place, "part": part.model_dump(mode="json")}
        item.status = "incomplete" if self._cut else "completed"
        place = len(self.body.output) - 1
        yield {"type": "response.output_item.done", "output_index": place, "item": item.model_dump(mode="json")}


class ResponseStream:
    """Server-sent events with names and numbers; there is no [DONE]."""

    headers = EVENTS

    def __init__(self, growing: GrowingResponse) -> None:
        self.growing = growing
        self._number = 0

    def write(self, answer: msgspec.Struct) -> bytes:
        growing = self.growing
        frames = b"" if self._number else self._begin()
        events = growing.complete(answer) if isinstance(answer, Done) else growing.grow(answer)
        return frames + b"".join(map(self._frame, events))

    def fail(self, error: PolymuxError) -> bytes:
        body = self.growing.body
        body.status = "failed"
        body.error = ResponseFailure(code=error.code or "server_error", message=error.message)
        return self._frame({"type": "response.failed", "response": body.model_dump(mode="json")})

    def close(self) -> bytes:
        return b""

    def _begin(self) -> bytes:
        body = self.growing.body.model_dump(mode="json")
        return b"".join(
            self._frame({"type": f"response.{each}", "response": body}) for each in ("created", "in_progress")
        )

    def _frame(self, event: dict[str, Any]) -> bytes:
        data = msgspec.json.encode({**event, "sequence_number": self._number})
        self._number += 1
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), data)
