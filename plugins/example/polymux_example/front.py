"""The half without a device: checks what is asked, and tells the caller what the engine says."""

from __future__ import annotations

from typing import Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import InvalidRequest
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Done
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux_example.work import Invent, Letters


class NamesFront(Front):
    def __init__(self, theme: str) -> None:
        self.theme = theme

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if not isinstance(ask, Invent):
            raise InvalidRequest(f"This model does not serve {task}.")
        if not 1 <= ask.count <= 64:
            raise InvalidRequest("count must be from 1 to 64", param="count")
        if not 0 < ask.temperature <= 4:
            raise InvalidRequest("temperature must be above 0 and at most 4", param="temperature")
        return Prepared(ask)

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return NamesPresenter()

    def describe(self) -> dict[str, Any]:
        return {"theme": self.theme}


class NamesPresenter(Presenter):
    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(body=body):
                return [unpack(body, Letters)]
            case Ended(receipt=receipt):
                return [Done(Usage(output_tokens=receipt.output_units), receipt)]
        return []
