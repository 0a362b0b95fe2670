"""Formats in the engine: grammars are compiled beside the device, and each branch is led by a guide of its own."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from polymux.core.batch.oneshot import OneShotModel, OneShotStage
from polymux.core.engine.site import Site
from polymux.core.errors import PolymuxError
from polymux.core.generation.work import GenerateWork
from polymux.core.text.grammar import Grammar, Grammars
from polymux.core.text.guide import GrammarGuide, Guide, ThoughtGuide


class GrammarCompiler(OneShotModel):
    """A grammar's text in, the compiled grammar out; what is wrong with one fails its own job alone."""

    def __init__(self, grammars: Grammars) -> None:
        self.grammars = grammars

    def forward(self, items: list[Any], slabs: list[Tensor]) -> list[Any]:
        return [self._compile(text) for text in items]

    def _compile(self, text: str) -> Grammar | PolymuxError:
        try:
            return self.grammars.compile(text)
        except PolymuxError as error:
            return error


class GrammarStage(OneShotStage):
    """Compiles grammars on the host executor while the device goes on."""

    def __init__(self, grammars: Grammars, site: Site) -> None:
        super().__init__("grammar", GrammarCompiler(grammars), site, max_units=1, max_rows=64, on_host=True)
        self.find = grammars.find


def open_guide(work: GenerateWork, grammar: Grammar | None) -> Guide | None:
    """The guide of one branch, None when it may say anything."""
    guidance = work.guidance
    if guidance is None:
        return None
    answer = GrammarGuide(grammar.open()) if grammar is not None else None
    thought = guidance.thought
    if thought is None:
        return answer
    return ThoughtGuide(
        thought.begin,
        thought.end,
        answer,
        inside=thought.inside,
        budget=thought.budget,
        stops=work.stop_token_ids,
    )
