"""Which words of a spoken answer are heard when, so that it can be cut where its playback stopped."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Stretch:
    """`text` is heard from `start` to `end`, in milliseconds of the answer's sound."""

    text: str
    start: float
    end: float


class Timeline:
    """Grows as the answer is spoken."""

    def __init__(self) -> None:
        self.milliseconds = 0.0
        """Of sound so far."""
        self._stretches: list[Stretch] = []

    @property
    def text(self) -> str:
        return "".join(stretch.text for stretch in self._stretches)

    def add(self, text: str, start: float, end: float) -> None:
        self._stretches.append(Stretch(text, start, end))

    def stretch(self, text: str) -> Stretch:
        """A text that begins now, and whose end `lengthen` moves until it is known."""
        self._stretches.append(Stretch(text, self.milliseconds, self.milliseconds))
        return self._stretches[-1]

    def lengthen(self, milliseconds: float) -> None:
        """So much more sound."""
        self.milliseconds += milliseconds

    def cut(self, milliseconds: float) -> str:
        """The text of what is played by then, in whole words; the rest, and its sound, is forgotten."""
        kept: list[Stretch] = []
        for stretch in self._stretches:
            if stretch.end <= milliseconds:
                kept.append(stretch)
            elif stretch.start < milliseconds:
                share = (milliseconds - stretch.start) / (stretch.end - stretch.start)
                said = cut_words(stretch.text, share)
                if said:
                    kept.append(Stretch(said, stretch.start, milliseconds))
        self._stretches, self.milliseconds = kept, milliseconds
        return self.text.rstrip()


def cut_words(text: str, share: float) -> str:
    """The words that are complete in the first `share` of the text: where nothing is known, letters last equally."""
    place = int(len(text) * share)
    if place >= len(text):
        return text
    while place and not (text[place].isspace() or text[place - 1].isspace()):
        place -= 1
    return text[:place]
