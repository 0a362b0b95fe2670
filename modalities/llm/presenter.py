"""Engine events become answers: text that grows, token logprobs, finish reasons, usage."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError
from polymux.core.pipeline import Presenter
from polymux.core.tasks import ChoiceEnded, Done, TextDelta, TokenLogprob, Vector
from polymux.core.text.detokenizer import Detokenizer, open_detokenizer
from polymux.core.text.stops import StopStrings
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import BranchEnded, Ended, Event, Output, Receipt, Tokens, Usage
from polymux.modalities.llm.work import SCORES, EmbedWork, GenerateWork, PromptScores

LOWEST_LOGPROB = -9999.0
"""What is shown for a token that could not have been drawn: JSON has no infinity."""


@dataclass
class Telling:
    """How a generation job's answers are told; what the engine need not know."""

    stops: list[str]
    skip_special: bool = True
    continues: bool = False
    """The answer continues the prompt's text (completions) instead of beginning its own (chat)."""
    echoes: list[str | None] | None = None
    """Per prompt what to say before its answers; None for a prompt of token ids, whose text is theirs."""


@dataclass
class Choice:
    """One branch: its text on the way to the caller."""

    index: int
    detokenizer: Detokenizer
    stops: StopStrings
    tokens: int = 0
    reason: str | None = None
    read: int = 0
    """Characters detokenised."""
    shown: int = 0
    """Characters that may be shown."""
    scores: deque[tuple[int, TokenLogprob]] = field(default_factory=deque)
    """Logprobs waiting for their token's text, with the character it begins at."""

    def grow(self, piece: str, score: TokenLogprob | None) -> str:
        """One more token with the text it completes; returns what may be shown of the text now."""
        self.tokens += 1
        if score is not None:
            self.scores.append((self.read, score))
        return self._show(piece)

    def finish(self) -> str:
        """No more tokens: what was held back is shown."""
        text = self._show(self.detokenizer.flush())
        rest = self.stops.flush()
        self.shown += len(rest)
        return text + rest

    def take_scores(self) -> list[TokenLogprob]:
        """The logprobs of tokens whose text is shown; at the end of a text that no stop string cut, of all."""
        whole = self.reason is not None and self.stops.matched is None
        taken = []
        while self.scores and (whole or self.scores[0][0] < self.shown):
            taken.append(self.scores.popleft()[1])
        return taken

    def _show(self, piece: str) -> str:
        self.read += len(piece)
        text = self.stops.push(piece)
        self.shown += len(text)
        return text


class GeneratePresenter(Presenter):
    """Tells the choices of one chat or completion.

    A choice that met a stop string ends at once: the engine is told to stop that branch, and tokens already on their
    way are dropped.
    """

    def __init__(self, tokenizer: Tokenizer, work: GenerateWork, telling: Telling) -> None:
        self._tokenizer = tokenizer
        self._work = work
        self._telling = telling
        self._stop_ids = frozenset(work.stop_token_ids)
        self._choices = [self._open(i, prompt) for i, prompt in enumerate(work.prompts) for _ in range(work.n)]
        for index, choice in enumerate(self._choices):
            choice.index = index
        self._unechoed = set(range(len(self._choices))) if telling.echoes is not None else set()
        self._prompt_scores: dict[int, list[TokenLogprob]] = {}
        self._unneeded: list[int] = []

    def take_unneeded(self) -> list[int]:
        unneeded, self._unneeded = self._unneeded, []
        return unneeded

    def feed(self, event: Event) -> list[msgspec.Struct]:
        answers: list[msgspec.Struct] = []
        match event:
            case Tokens(branch=branch):
                answers += self._echo(branch)
                answers += self._extend(self._choices[branch], event)
            case BranchEnded(branch=branch, reason=reason):
                answers += self._echo(branch)
                answers += self._end(self._choices[branch], reason)
            case Output(kind=kind, body=body) if kind == SCORES:
                self._read_scores(unpack(body, PromptScores))
            case Ended(receipt=receipt):
                return [self._finish(receipt)]
        return answers

    def _open(self, index: int, prompt: list[int]) -> Choice:
        echoes = self._telling.echoes
        spelled = echoes is not None and echoes[index] is None
        context = prompt if self._telling.continues and not spelled else []
        detokenizer = open_detokenizer(self._tokenizer, context, skip_special=self._telling.skip_special)
        return Choice(0, detokenizer, StopStrings(self._telling.stops))

    def _echo(self, branch: int) -> list[msgspec.Struct]:
        """The prompt, before the first word of its answer."""
        if branch not in self._unechoed:
            return []
        self._unechoed.discard(branch)
        prompt = branch // self._work.n
        if self._work.score_prompts and prompt not in self._prompt_scores:
            raise InternalError(f"The engine sent tokens of prompt {prompt} before its scores.")
        text = self._telling.echoes[prompt] if self._telling.echoes else None
        if text is None:
            text = "".join(map(self._choices[branch].detokenizer.push, self._work.prompts[prompt]))
        return [TextDelta(index=branch, text=text, logprobs=self._prompt_scores.get(prompt))]

    def _extend(self, choice: Choice, event: Tokens) -> list[msgspec.Struct]:
        if choice.reason is not None:
            return []
        text = ""
        for i, id in enumerate(event.ids):
            if id in self._stop_ids:
                choice.tokens += 1
                break
            score = None
            if event.logprobs is not None:
                score = self._score(id, event.logprobs[i], event.top[i] if event.top else [])
            text += choice.grow(choice.detokenizer.push(id), score)
            if choice.stops.matched is not None:
                self._unneeded.append(choice.index)
                return self._end(choice, "stop", text)
        return self._tell(choice, text)

    def _end(self, choice: Choice, reason: str, text: str = "") -> list[msgspec.Struct]:
        if choice.reason is not None:
            return []
        text += choice.finish()
        choice.reason = "stop" if choice.stops.matched is not None else reason
        return [*self._tell(choice, text), ChoiceEnded(choice.index, choice.reason)]

    def _tell(self, choice: Choice, text: str) -> list[msgspec.Struct]:
        scores = choice.take_scores()
        if not text and not scores:
            return []
        return [TextDelta(choice.index, text, scores if self._work.logprobs is not None else None)]

    def _score(self, id: int, logprob: float, top: list[tuple[int, float]]) -> TokenLogprob:
        data = self._tokenizer.token_bytes(id)
        others = [self._score(other, value, []) for other, value in top]
        return TokenLogprob(data.decode(errors="replace"), clamp(logprob), data, others)

    def _read_scores(self, scores: PromptScores) -> None:
        """The first token has no score of its own: nothing came before it. It is told as minus infinity."""
        first, *rest = self._work.prompts[scores.prompt]
        told = [msgspec.structs.replace(self._score(first, 0.0, []), logprob=-math.inf)]
        told += [self._score(*entry) for entry in zip(rest, scores.logprobs, scores.top, strict=True)]
        self._prompt_scores[scores.prompt] = told

    def _finish(self, receipt: Receipt) -> Done:
        usage = Usage(
            input_tokens=sum(map(len, self._work.prompts)),
            output_tokens=sum(choice.tokens for choice in self._choices),
            cached_tokens=receipt.cached_units,
        )
        return Done(usage, receipt)


class EmbedPresenter(Presenter):
    """Tells the vectors of one embedding job in the order of its inputs, whatever order they come in."""

    def __init__(self, work: EmbedWork) -> None:
        self._work = work
        self._next = 0
        self._early: dict[int, Vector] = {}

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(body=body):
                vector = unpack(body, Vector)
                self._early[vector.index] = vector
                answers: list[msgspec.Struct] = []
                while self._next in self._early:
                    answers.append(self._early.pop(self._next))
                    self._next += 1
                return answers
            case Ended(receipt=receipt):
                tokens = sum(map(len, self._work.inputs))
                return [Done(Usage(input_tokens=tokens, cached_tokens=receipt.cached_units), receipt)]
        return []


def clamp(logprob: float) -> float:
    """A logprob that can be shown: finite and at most 0, whatever rounding or a mask made of it."""
    return min(0.0, max(LOWEST_LOGPROB, logprob))
