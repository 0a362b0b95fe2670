"""A text becomes pieces that a voice says one after the other; joined, they are the text again, to the last character.

What ends a sentence is judged by marks and spacing alone. Numbers, abbreviations and markup are the voice's own matter.
"""

from __future__ import annotations

import re

END = re.compile(
    r"(?<![.!?…])(?P<mark>[.!?…]++)[\"'”’»)\]]*+(?=\s)\s*"  # the next word stands apart; a run is looked at once
    r"|[。！？]+[\"'”’»」』）]*\s*"  # scripts that leave no space
    r"|\n\s*"
)

BEFORE_NAMES = re.compile(
    "Mr|Mrs|Ms|Mx|Dr|Prof|St|Mt|Ft|Gen|Gov|Sen|Rep|Capt|Lt|Col|Sgt|Cmdr|Rev|Hon|Pres|Cpl|Maj|Adm|Fr|Messrs|vs"
)
"""Abbreviations whose point ends no sentence, though what follows begins with a capital letter or a digit."""

LONGEST_NAME = 40
"""Characters before a point in which such a one is looked for."""

CLAUSE = re.compile(r"[,;:.!?…—、，；：。！？][\"'”’»)\]]*\s*")


def split_sentences(text: str) -> list[str]:
    """Sentences with the spacing that follows them; a line break ends one unless lower case follows."""
    pieces: list[str] = []
    start = 0
    for end in END.finditer(text):
        if end.end() < len(text) and _ends(text, end):
            pieces.append(text[start : end.end()])
            start = end.end()
    if start < len(text):
        pieces.append(text[start:])
    return pieces


def _ends(text: str, end: re.Match[str]) -> bool:
    if "\n\n" in end[0].replace("\r", ""):
        return True
    if text[end.end()].islower():
        return False
    if end["mark"] != ".":
        return True
    before = text[max(end.start() - LONGEST_NAME, 0) : end.start()].split()
    word = before[-1].lstrip("(\"“'‘[") if before else ""
    return "\n" in end[0] or not (BEFORE_NAMES.fullmatch(word) or (len(word) == 1 and word.isupper()))


def cut_text(text: str, longest: int) -> list[str]:
    """Pieces of at most `longest` characters: cut behind a clause, else at a space, else anywhere."""
    pieces: list[str] = []
    while len(text) > longest:
        place = _find_cut(text, longest)
        pieces.append(text[:place])
        text = text[place:]
    return [*pieces, text] if text else pieces


def _find_cut(text: str, longest: int) -> int:
    """Where to cut within the first `longest` characters; a clause in the first third would leave too little."""
    clauses = [clause.end() for clause in CLAUSE.finditer(text[:longest])]
    if clauses and clauses[-1] > longest // 3:
        return clauses[-1]
    space = text.rfind(" ", 0, longest)
    return space + 1 if space > 0 else longest
