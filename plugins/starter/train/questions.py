"""The questions that can be asked about a scene, with their answers, in the words that people use."""

from __future__ import annotations

from dataclasses import dataclass

from scenes import COLOURS, OPPOSITE, SHAPES, Scene, plural

ASKED = ("colour", "shape", "count", "position", "size", "digit")
"""Subjects that are judged; training has "word", "check" and "caption" too."""


@dataclass(frozen=True)
class Question:
    subject: str
    text: str
    answer: str


def list_questions(scene: Scene) -> list[Question]:
    """All of a scene, in one order."""
    makers = {"one": ask_one, "pair": ask_pair, "count": ask_count, "digit": ask_sign, "word": ask_sign}
    asked = makers[scene.family](scene)
    told = ("Describe the picture.", "What is in the picture?", "What do you see?", "Describe this image.")
    return [*asked, *(Question("caption", text, scene.caption) for text in told)]


def ask_colour(name: str, colour: str, *, many: bool = False) -> list[Question]:
    verb = "are" if many else "is"
    return [Question("colour", f"What {colour_} {verb} {name}?", colour) for colour_ in ("colour", "color")]


def ask_shape(name: str, shape: str) -> list[Question]:
    return [Question("shape", f"{which} shape is {name}?", shape) for which in ("What", "Which")]


def ask_number(name: str, count: int) -> list[Question]:
    texts = (f"How many {name} are there?", f"How many {name} do you see?", f"Count the {name}.")
    return [Question("count", text, str(count)) for text in texts]


def check(text: str, right: str, other: str) -> list[Question]:
    """`text` with what is so and with what is not."""
    return [Question("check", text.format(right), "yes"), Question("check", text.format(other), "no")]


def following(names: tuple[str, ...], name: str) -> str:
    """Another name of the same kind: the next one."""
    return names[(names.index(name) + 1) % len(names)]


def ask_one(scene: Scene) -> list[Question]:
    (thing,) = scene.things
    name, colours = f"the {thing.kind}", tuple(COLOURS)
    asked = [*ask_colour("it", thing.colour), *ask_colour("the shape", thing.colour), *ask_colour(name, thing.colour)]
    asked += [*ask_shape("it", thing.kind), *ask_shape("in the picture", thing.kind), *ask_shape("this", thing.kind)]
    asked += [*ask_number("shapes", 1), *ask_number(plural(thing.kind), 1)]
    for text in (f"Where is {name}?", "Where is it?", "Where is the shape?"):
        asked.append(Question("position", text, scene.how))
    for text in ("Is it small or large?", f"Is {name} small or large?", f"What size is {name}?"):
        asked.append(Question("size", text, thing.size))
    asked += check(f"Is {name} {{}}?", thing.colour, following(colours, thing.colour))
    asked += check("Is there a {}?", thing.kind, following(SHAPES, thing.kind))
    asked += check("Is it {}?", thing.size, "large" if thing.size == "small" else "small")
    return asked


def ask_pair(scene: Scene) -> list[Question]:
    asked = ask_number("shapes", 2)
    way, back = scene.how, OPPOSITE[scene.how]
    for (thing, other), where in zip((scene.things, scene.things[::-1]), (way, back), strict=True):
        name, another = f"the {thing.kind}", f"the {other.kind}"
        asked += ask_colour(name, thing.colour)
        asked += [*ask_shape(thing.colour, thing.kind), *ask_shape(f"the {thing.colour} one", thing.kind)]
        asked.append(Question("position", f"Is {name} left of, right of, above or below {another}?", where))
        asked.append(Question("position", f"Where is {name}, seen from {another}?", where))
        asked.append(Question("position", f"Where is {name}?", {"above": "top", "below": "bottom"}.get(where, where)))
        asked += check(f"Is {name} {{}}?", thing.colour, other.colour)
        told = {each: f"{each} of" if each in ("left", "right") else each for each in OPPOSITE}
        asked += check(f"Is {name} {{}} {another}?", told[where], told[OPPOSITE[where]])
        asked.append(Question("count", f"How many {plural(thing.kind)} are there?", "1"))
        if thing.size == "medium":
            continue
        asked.append(Question("size", f"Is {name} small or large?", thing.size))
        more = "larger" if thing.size == "large" else "smaller"
        asked.append(Question("size", f"Which shape is {more}?", thing.kind))
        asked.append(Question("size", f"Is {name} larger or smaller than {another}?", more))
    return asked


def ask_count(scene: Scene) -> list[Question]:
    thing, count = scene.things[0], len(scene.things)
    name = plural(thing.kind)
    asked = [*ask_number(name, count), *ask_number("shapes", count), *ask_number(f"{thing.colour} {name}", count)]
    asked += [*ask_colour("they", thing.colour, many=True), *ask_colour(f"the {name}", thing.colour, many=True)]
    asked += [Question("shape", text, thing.kind) for text in ("What shapes are they?", "Which shape do they have?")]
    asked += check(f"Are the {name} {{}}?", thing.colour, following(tuple(COLOURS), thing.colour))
    return asked


def ask_sign(scene: Scene) -> list[Question]:
    """A digit or a word."""
    (thing,) = scene.things
    kind = scene.family
    texts = [f"Which {kind} is it?", f"What {kind} is shown?", f"Which {kind} is in the picture?", f"Read the {kind}."]
    asked = [Question(kind, text, thing.kind) for text in texts]
    asked += [*ask_colour("it", thing.colour), *ask_colour(f"the {kind}", thing.colour)]
    return asked
