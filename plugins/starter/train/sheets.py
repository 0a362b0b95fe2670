"""Prompts with their answers, as batches: a picture is shown once, and several questions about it stand behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from questions import list_questions
from scenes import Scene
from torch import Generator, Tensor

PAD, END, SYSTEM, USER, ASSISTANT = "<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
IMAGE, FENCE, GLOBAL = "<image>", "<fake_token_around_image>", "<global-img>"
MARKS = (PAD, END, SYSTEM, USER, ASSISTANT, IMAGE, FENCE, GLOBAL)
PREFACES = ("", "", "", "You are a helpful assistant.", "Answer in one word.", "Answer briefly.")
QUESTIONS = 4
"""About each picture."""
LONGEST = 40
"""Tokens of a question with its answer."""
IGNORED = -100
"""In place of a token that is not to be learnt."""


@dataclass
class Pages:
    """Texts as rows of token ids, each of its length; `answers` says where the first token to learn stands."""

    ids: Tensor
    lengths: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> Pages:
        return Pages(*(each.to(device) for each in (self.ids, self.lengths, self.answers)))


class Book:
    """All questions of all scenes, tokenised, and how likely each is: a scene's subjects come equally often."""

    def __init__(self, scenes: list[Scene], tokenizer: Any, device: torch.device) -> None:
        asked = [list_questions(scene) for scene in scenes]
        widest = max(map(len, asked))
        numbers: dict[tuple[str, str], int] = {}
        rows, chances = [], []
        for questions in asked:
            subjects = [question.subject for question in questions]
            row = [numbers.setdefault((each.text, each.answer), len(numbers)) for each in questions]
            odds = [1 / subjects.count(subject) for subject in subjects]
            rows.append(row + [0] * (widest - len(row)))
            chances.append(odds + [0.0] * (widest - len(row)))
        self.questions = torch.tensor(rows, device=device)
        self.chances = torch.tensor(chances, device=device)
        self.pages = make_pages(list(numbers), tokenizer).to(device)

    def open(self, index: Tensor, generator: Generator) -> Tensor:
        """(batch, QUESTIONS) numbers of pages for scenes (batch,)."""
        chosen = torch.multinomial(self.chances[index], QUESTIONS, generator=generator)
        return self.questions[index].gather(1, chosen)


def make_pages(asked: list[tuple[str, str]], tokenizer: Any) -> Pages:
    """`<|user|>question<|end|><|assistant|>answer<|end|>` of each."""
    before = [each.ids for each in tokenizer.encode_batch([f"{USER}{text}{END}{ASSISTANT}" for text, _ in asked])]
    behind = [each.ids for each in tokenizer.encode_batch([f"{answer}{END}" for _, answer in asked])]
    ids = torch.zeros(len(asked), LONGEST, dtype=torch.long)
    for row, (question, answer) in enumerate(zip(before, behind, strict=True)):
        ids[row, : len(question) + len(answer)] = torch.tensor(question + answer)
    answers = torch.tensor([len(each) for each in before])
    return Pages(ids, answers + torch.tensor([len(each) for each in behind]), answers)


def make_covers(tokenizer: Any, places: int) -> Pages:
    """What stands before the first question: a preface or none, and as many places as a picture has vectors."""
    shown = f"{USER}{FENCE}{GLOBAL}{IMAGE * places}{FENCE}"
    texts = [f"{SYSTEM}{preface}{END}{shown}" if preface else shown for preface in PREFACES]
    rows = [each.ids for each in tokenizer.encode_batch(texts)]
    ids = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for row, told in enumerate(rows):
        ids[row, : len(told)] = torch.tensor(told)
    lengths = torch.tensor([len(each) for each in rows])
    return Pages(ids, lengths, lengths)


@dataclass
class Sheet:
    """A batch. (batch, tokens): `ids`, `places`, and `wanted`, the next token where it is to be learnt;
    `seen` (batch, 1, tokens, tokens): which tokens attend to which."""

    ids: Tensor
    places: Tensor
    wanted: Tensor
    seen: Tensor


def set_sheet(covers: Pages, pages: Pages, cover: Tensor, chosen: Tensor, joined: Tensor) -> Sheet:
    """Puts a cover and questions one behind the other. `cover` (batch,), `chosen` (batch, questions).

    `joined` (batch,): the questions are one conversation; otherwise each sees the cover alone.
    """
    batch, count = chosen.shape
    device = chosen.device
    # the cover opens the user's message itself: questions that follow it directly do without their mark
    bare = torch.ones(batch, count, dtype=torch.bool, device=device)
    bare[:, 1:] = ~joined[:, None]
    skipped = bare.long()
    lengths = torch.cat([covers.lengths[cover, None], pages.lengths[chosen] - skipped], 1)
    ends = lengths.cumsum(1)
    width = -(-int(ends[:, -1].max()) // 8) * 8
    line = torch.arange(width, device=device).expand(batch, -1).contiguous()
    part = torch.searchsorted(ends, line, right=True)
    inside = part <= count
    own = part.clamp(max=count)
    offset = line - (ends - lengths).gather(1, own)
    question = (own - 1).clamp(min=0)
    page = chosen.gather(1, question)
    within = (offset + skipped.gather(1, question)).clamp(max=LONGEST - 1)
    first = covers.ids[cover[:, None], offset.clamp(max=covers.ids.shape[1] - 1)]
    ids = torch.where(own == 0, first, pages.ids[page, within])
    ids = torch.where(inside, ids, 0)
    learnt = inside & (own > 0) & (within >= pages.answers[page])
    wanted = torch.where(learnt, ids, IGNORED).roll(-1, 1)
    wanted[:, -1] = IGNORED
    places = torch.where(joined[:, None] | (own == 0), line, lengths[:, :1] + offset)
    seen = (own[:, None, :] == 0) | (own[:, None, :] == own[:, :, None]) | joined[:, None, None]
    seen = seen & inside[:, None, :] & (line[:, None, :] <= line[:, :, None])
    seen = seen | torch.eye(width, dtype=torch.bool, device=device)
    return Sheet(ids, places, wanted, seen[:, None])
