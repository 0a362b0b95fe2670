"""What is to be said: texts at a pace of their own, and pauses between them."""

from __future__ import annotations

import math
from dataclasses import dataclass

from polymux.core.errors import InvalidRequest
from polymux.core.speech.ssml import read_ssml
from polymux.core.tasks import Speak

SLOWEST, FASTEST = 0.25, 4.0
"""Times a voice's own pace."""

LONGEST_PAUSE = 10.0
"""Seconds."""


@dataclass(frozen=True)
class Say:
    """A text, or the phonemes of one, `pace` times as fast as the voice speaks by itself."""

    text: str
    pace: float = 1.0
    phonemes: bool = False


@dataclass(frozen=True)
class Pause:
    seconds: float


Script = list[Say | Pause]


def read_script(ask: Speak) -> Script:
    """Texts and pauses in order. Raises `InvalidRequest` for a pace that cannot be spoken, and for SSML that is none or
    says what no voice here can do."""
    check_pace(ask.speed, "speed")
    match ask.kind:
        case "text":
            return [Say(ask.text, ask.speed)]
        case "phonemes":
            return [Say(ask.text, ask.speed, phonemes=True)]
        case "ssml":
            return [_pace(part, ask.speed) for part in read_ssml(ask.text)]
    raise InvalidRequest(f"kind must be text, ssml or phonemes, not {ask.kind[:40]!r}", param="input_type")


def _pace(part: tuple[str, float] | float, speed: float) -> Say | Pause:
    if isinstance(part, float):
        if part > LONGEST_PAUSE:
            raise InvalidRequest(f"a break of {part:g} seconds is longer than {LONGEST_PAUSE:g}", param="input")
        return Pause(part)
    text, rate = part
    pace = check_pace(rate * speed, "input" if rate != 1.0 else "speed")
    return Say(text, pace)


def check_pace(pace: float, param: str) -> float:
    if not (math.isfinite(pace) and SLOWEST <= pace <= FASTEST):
        raise InvalidRequest(f"speed must be from {SLOWEST} to {FASTEST:g}, also where a text changes it", param=param)
    return pace
