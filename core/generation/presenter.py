"""Engine events become answers: text that grows, token logprobs, finish reasons, usage."""

from __future__ import annotations

import itertools
import math
import secrets
import string
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import InternalError
from polymux.core.generation.choice import Choice
from polymux.core.generation.habits import Manner
from polymux.core.generation.work import SCORES, GenerateWork, PromptScores
from polymux.core.pipeline import Presenter
from polymux.core.tasks import CallDelta, ChoiceEnded, Done, TextDelta, ThoughtDelta, TokenLogprob
from polymux.core.text.detokenizer import open_detokenizer
from polymux.core.text.parts import Part
from polymux.core.text.stops import StopStrings
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import BranchEnded, Ended, Event, Output, Receipt, Tokens, Usage

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
    manner: Manner = field(default_factory=lambda: Manner(None, None, None))
    kept: frozenset[int] = frozenset()
    """Special tokens whose text is read, though not told."""


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
        self._choices = [self._open(branch) for branch in range(len(work.prompts) * work.n)]
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

    def _open(self, branch: int) -> Choice:
        telling, prompt = self._telling, branch // self._work.n
        spelled = telling.echoes is not None and telling.echoes[prompt] is None
        context = self._work.prompts[prompt] if telling.continues and not spelled else []
        detokenizer = open_detokenizer(self._tokenizer, context, skip_special=telling.skip_special, kept=telling.kept)
        return Choice(branch, detokenizer, telling.manner.open_reader(), StopStrings(telling.stops))

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
        parts: list[Part] = []
        for i, id in enumerate(event.ids):
            if id in self._stop_ids:
                choice.tokens += 1
                break
            score = None
            if event.logprobs is not None:
                score = self._score(id, event.logprobs[i], event.top[i] if event.top else [])
            parts += choice.grow(choice.detokenizer.push(id), score)
            if choice.stops.matched is not None:
                self._unneeded.append(choice.index)
                return self._end(choice, "stop", parts)
        return self._tell(choice, parts)

    def _end(self, choice: Choice, reason: str, parts: Sequence[Part] = ()) -> list[msgspec.Struct]:
        if choice.reason is not None:
            return []
        parts = [*parts, *choice.finish()]
        choice.reason = "stop" if choice.stops.matched is not None else reason
        told = self._tell(choice, parts)
        called = choice.reader.called and choice.reason == "stop"
        reason = "tool_calls" if called else choice.reason
        return [*told, ChoiceEnded(choice.index, reason, choice.stops.matched)]

    def _tell(self, choice: Choice, parts: Sequence[Part]) -> list[msgspec.Struct]:
        """Neighbours of a kind are told together; the scores of all with the first."""
        scores = choice.take_scores() if self._work.logprobs is not None else None
        answers: list[msgspec.Struct] = []
        for kind, group in itertools.groupby(parts, key=lambda part: part.kind):
            if kind == "call":
                for part in group:
                    answers.append(self._call(choice, part.text, scores))
                    scores = [] if scores else scores
                continue
            text = "".join(part.text for part in group)
            if kind == "text":
                answers.append(TextDelta(choice.index, text, scores))
            elif kind == "thought":
                answers.append(ThoughtDelta(choice.index, text, scores))
            else:
                answers.append(CallDelta(choice.index, choice.calls - 1, text, logprobs=scores))
            scores = [] if scores else scores
        if scores:
            answers.append(TextDelta(choice.index, "", scores))
        return answers

    def _call(self, choice: Choice, name: str, scores: list[TokenLogprob] | None) -> CallDelta:
        choice.calls += 1
        calls = self._telling.manner.calls
        id = draw_call_id(calls.id_length if calls is not None else None)
        return CallDelta(choice.index, choice.calls - 1, id=id, name=name, logprobs=scores)

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
            reasoning_tokens=sum(choice.thought_tokens for choice in self._choices),
        )
        return Done(usage, receipt)


def draw_call_id(length: int | None) -> str:
    """A call's id: of so many letters and digits, where the model's template wants to know, else the usual form."""
    if length is None:
        return f"call_{secrets.token_hex(12)}"
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


def clamp(logprob: float) -> float:
    """A logprob that can be shown: finite and at most 0, whatever rounding or a mask made of it."""
    return min(0.0, max(LOWEST_LOGPROB, logprob))
