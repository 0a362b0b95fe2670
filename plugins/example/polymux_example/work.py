"""What is asked, what is answered, and what crosses between the front and the engine."""

from __future__ import annotations

import msgspec
from pydantic import BaseModel, Field

from polymux.core.tasks import Done
from polymux.core.vocabulary import Route, Task

ALPHABET = "\nabcdefghijklmnopqrstuvwxyz"
"""A name begins and ends with the first one."""


class Invent(msgspec.Struct):
    """How many names to invent."""

    count: int = 1
    seed: int = 0
    temperature: float = 1.0


class Letters(msgspec.Struct):
    """The next letters of name `index`."""

    index: int
    text: str


class InventRequest(BaseModel):
    """The body of a request."""

    model: str
    count: int = Field(1, ge=1, le=64, description="How many names.")
    seed: int = Field(0, description="The same seed invents the same names.")
    temperature: float = Field(1.0, gt=0, le=4, description="Above 1: stranger.")


class LettersFrame(BaseModel):
    """One event of the stream."""

    index: int
    text: str


INVENT = Task(
    "invent",
    Invent,
    (Letters, Done),
    Route("POST", "/v1/names", InventRequest, LettersFrame, stream="sse", summary="Invent names, letter by letter"),
)
