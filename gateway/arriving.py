"""Work on a form begins while its file still arrives.

Nothing is sent before all of it is there: until then the status is an honest one, and a field behind the file counts
like one before it, by beginning again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polymux.core.errors import NotReady, PolymuxError
from polymux.gateway.forms import Form, FormResponse, FormStream
from polymux.gateway.state import Gateway

ENOUGH = 128 << 10
"""Bytes of a file from which on it is worth beginning early."""

Respond = Callable[[], ASGIApp]
"""Makes the response from what the form holds by now."""


async def answer_form(gateway: Gateway, stream: FormStream, respond: Respond) -> ASGIApp:
    """The response to a form, which it closes; begun early where the form can be understood before its file is there.

    Raises as `read_form` and `respond` do; the form is closed then.
    """
    try:
        await stream.read(lambda form: bool(form.uploads) and form.uploads[0][1].size >= ENOUGH)
        if not stream.complete and not gateway.arriving.locked():
            try:
                early = respond()
            except PolymuxError:
                pass  # what is missing, or wrong, may still come
            else:
                return ArrivingResponse(gateway, stream, early, respond)
        await stream.read()
        return FormResponse(stream.form, respond())
    except BaseException:
        stream.form.close()
        raise


class ArrivingResponse:
    """An ASGI response that reads the rest of its form beside its work."""

    def __init__(self, gateway: Gateway, stream: FormStream, early: ASGIApp, respond: Respond) -> None:
        """`early` is what `respond` makes of the form as it is now."""
        self.gateway = gateway
        self.stream = stream
        self.early = early
        self.respond = respond

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        fields = count_parts(self.stream.form)
        try:
            async with self.gateway.arriving:
                reading = asyncio.create_task(self.stream.read())
                held = HeldWire(reading, lambda: count_parts(self.stream.form) == fields, receive, send)
                working = asyncio.create_task(self.early(scope, held.receive, held.send))  # type: ignore[arg-type]
                try:
                    await asyncio.wait({reading, working}, return_when=asyncio.FIRST_COMPLETED)
                    if not working.done():
                        await reading
                    if working.done() or held.open:
                        await working
                        return
                finally:
                    reading.cancel()
                    working.cancel()
                    await asyncio.gather(reading, working, return_exceptions=True)
            await self.respond()(scope, receive, send)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self.gateway.draining and task is not None:
                task.uncancel()
                raise NotReady("the server is stopping", retry_after=1) from None
            raise
        finally:
            self.stream.form.close()


class HeldWire:
    """The way to the client, for work that began early: open once the whole form is read and still says the same."""

    def __init__(
        self, reading: asyncio.Task[None], unchanged: Callable[[], bool], receive: Receive, send: Send
    ) -> None:
        self._reading = reading
        self._unchanged = unchanged
        self._receive = receive
        self._send = send

    @property
    def open(self) -> bool:
        read = self._reading.done() and not self._reading.cancelled() and self._reading.exception() is None
        return read and self._unchanged()

    async def receive(self) -> Message:
        await self._wait()
        return await self._receive()

    async def send(self, message: Message) -> None:
        await self._wait()
        await self._send(message)

    async def _wait(self) -> None:
        await asyncio.wait({self._reading})
        if not self.open:  # whoever began the work ends it
            await asyncio.get_running_loop().create_future()


def count_parts(form: Form) -> tuple[int, int]:
    return len(form.fields), len(form.uploads)
