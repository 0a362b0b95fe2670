"""A subset of SSML 1.1: speak, p, s, break, prosody with a rate, sub, say-as. All else is refused by name.

What a voice would read wrongly is worse than an error: an element or attribute that is not honoured is never skipped.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from xml.etree.ElementTree import Element, ParseError, XMLPullParser

from polymux.core.errors import InvalidRequest

STRENGTHS = {"none": 0.0, "x-weak": 0.1, "weak": 0.2, "medium": 0.4, "strong": 0.8, "x-strong": 1.2}
"""Seconds of a break that says only how strong it is."""

RATES = {"x-slow": 0.5, "slow": 0.75, "medium": 1.0, "default": 1.0, "fast": 1.25, "x-fast": 1.75}

PARAGRAPH, SENTENCE = 0.6, 0.0
"""Seconds after a p; an s only ends the sentence, as a full stop does."""

ATTRIBUTES = {
    "speak": {"version", "lang", "schemaLocation"},
    "p": {"lang"},
    "s": {"lang"},
    "break": {"time", "strength"},
    "prosody": {"rate"},
    "sub": {"alias"},
    "say-as": {"interpret-as"},
}

Part = tuple[str, float] | float
"""(text, rate), or the seconds of a pause."""


def read_ssml(document: str) -> list[Part]:
    """Texts and pauses in order. Raises `InvalidRequest` with what is wrong and where it can be read."""
    if re.search(r"<!(?!--|\[CDATA\[)", document):
        raise _refuse("declarations (<!...>) are not allowed")
    reader = _Reader()
    parser = XMLPullParser(events=("start", "end"))
    try:
        parser.feed(document.strip())
        parser.close()
        events = list(parser.read_events())
    except ParseError as error:
        raise _refuse(f"it is not well-formed XML ({error})") from error
    for event, element in events:  # the tree is complete: an element has its text, its tail follows its end
        reader.open(element) if event == "start" else reader.close(element)
    return reader.parts


class _Reader:
    """Walks without recursion: a document may be nested deeper than Python's stack."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._rates = [1.0]
        self._spell: list[Callable[[str], str] | None] = [None]
        self._silenced = 0
        self._depth = 0

    def open(self, element: Element) -> None:
        name = _name(element)
        if name not in ATTRIBUTES:
            raise _refuse(f"element {name!r} is not supported; there are: {', '.join(ATTRIBUTES)}")
        if (name == "speak") != (self._depth == 0):
            raise _refuse("one speak element must hold all others")
        attributes = {key.rsplit("}", 1)[-1]: value for key, value in element.attrib.items()}
        if unknown := sorted(attributes.keys() - ATTRIBUTES[name]):
            raise _refuse(f"attribute {unknown[0]!r} of {name} is not supported")
        self._depth += 1
        rate, spell = self._rates[-1], self._spell[-1]
        match name:
            case "break":
                if (element.text or "").strip() or len(element):
                    raise _refuse("a break holds nothing")
                self._pause(_read_break(attributes))
            case "prosody":
                rate *= _read_rate(attributes.get("rate"))
            case "sub":
                self._say(_required(attributes, name, "alias"))
            case "say-as":
                spell = _find_spelling(_required(attributes, name, "interpret-as"))
        self._rates.append(rate)
        self._spell.append(spell)
        self._silenced += name == "sub"
        self._say(element.text)

    def close(self, element: Element) -> None:
        self._depth -= 1
        self._rates.pop()
        self._spell.pop()
        match _name(element):
            case "sub":
                self._silenced -= 1
            case "p":
                self._pause(PARAGRAPH)
            case "s":
                self._pause(SENTENCE)
        self._say(element.tail)

    def _say(self, text: str | None) -> None:
        if not text or self._silenced or self._depth == 0:
            return
        spell = self._spell[-1]
        text = spell(text) if spell is not None else text
        if self.parts and isinstance(last := self.parts[-1], tuple) and last[1] == self._rates[-1]:
            self.parts[-1] = (last[0] + text, last[1])
        else:
            self.parts.append((text, self._rates[-1]))

    def _pause(self, seconds: float) -> None:
        self.parts.append(float(seconds))


def _read_break(attributes: dict[str, str]) -> float:
    if "time" not in attributes:
        strength = attributes.get("strength", "medium")
        if strength not in STRENGTHS:
            raise _refuse(f"break strength {strength!r} is none of {', '.join(STRENGTHS)}")
        return STRENGTHS[strength]
    found = re.fullmatch(r"\+?(\d{1,6}(?:\.\d{1,6})?)(ms|s)", attributes["time"].strip())
    if found is None:
        raise _refuse(f"break time {attributes['time']!r} is no number of ms or s")
    return float(found[1]) / (1000 if found[2] == "ms" else 1)


def _read_rate(rate: str | None) -> float:
    if rate is None:
        raise _refuse("prosody needs a rate; pitch, range, contour and volume are not supported")
    if rate in RATES:
        return RATES[rate]
    found = re.fullmatch(r"([+-]?)(\d{1,6}(?:\.\d{1,6})?)(%?)", rate.strip())
    if found is None or (found[1] and not found[3]):
        raise _refuse(f"prosody rate {rate!r} is no percentage, no factor and none of {', '.join(RATES)}")
    value = float(found[2]) / (100 if found[3] else 1)
    if found[1]:
        value = 1 + value if found[1] == "+" else 1 - value
    if not (math.isfinite(value) and value > 0):
        raise _refuse(f"nothing is said at a prosody rate of {rate!r}")
    return value


def _find_spelling(kind: str) -> Callable[[str], str]:
    if kind not in SPELLINGS:
        raise _refuse(f"say-as {kind!r} is not supported; there are: {', '.join(SPELLINGS)}")
    return SPELLINGS[kind]


def _spell_out(text: str) -> str:
    return ", ".join(character.upper() for character in text if not character.isspace())


def _say_digits(text: str) -> str:
    return ", ".join(character for character in text if character.isalnum())


SPELLINGS: dict[str, Callable[[str], str]] = {
    "characters": _spell_out,
    "spell-out": _spell_out,
    "digits": _say_digits,
    "cardinal": str,
    "number": str,
}
"""cardinal and number are how every voice reads digits anyway."""


def _required(attributes: dict[str, str], element: str, name: str) -> str:
    if name not in attributes:
        raise _refuse(f"{element} needs {name}")
    return attributes[name]


def _name(element: Element) -> str:
    return str(element.tag).rsplit("}", 1)[-1]


def _refuse(why: str) -> InvalidRequest:
    return InvalidRequest(f"input is SSML that cannot be spoken: {why}", param="input", code="invalid_ssml")
