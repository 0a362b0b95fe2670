"""The device-free half of vision-language models: pictures in a conversation are read, cut, and given their places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from polymux.core.errors import InvalidRequest
from polymux.core.generation.front import GenerateFront
from polymux.core.generation.limits import read_context
from polymux.core.generation.spelling import spell
from polymux.core.pictures import read_source
from polymux.core.pipeline import Prepared, Presenter
from polymux.core.tasks import Chat, Embed, Tokenize
from polymux.core.text.template import ChatTemplate
from polymux.core.text.tokenizer import Tokenizer
from polymux.modalities.vision.cut import Cut, Cutter
from polymux.modalities.vision.embedding import ShowPresenter, check_inputs, cut_one, is_picture
from polymux.modalities.vision.positions import Grid, place_tokens
from polymux.modalities.vision.processor import make_cutter
from polymux.modalities.vision.work import Item, LookWork, Picture, ShowWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

MOST_PICTURES = 128
"""Of one conversation."""
MOST_FRAMES = 256
"""Of all its clips."""
DETAILS = ("auto", "low", "high", "original")
FRAMES_PER_SECOND = 2.0
"""Of a clip that does not say when its frames are seen."""


class SeenChat(Chat, kw_only=True):
    """A conversation whose pictures are read."""

    cuts: list[Cut]


@dataclass(frozen=True)
class Placed:
    """A prompt with places for its pictures' vectors."""

    tokens: list[int]
    pictures: list[Picture]
    positions: np.ndarray | None


class LookFront(GenerateFront):
    """Chats about pictures, and all that a language model serves."""

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate | None, context: int, vocabulary: int, cutter: Cutter
    ) -> None:
        super().__init__(tokenizer, template, context, vocabulary)
        self.cutter = cutter
        self._marks = tuple(mark for mark in (cutter.mark, cutter.clip_mark) if mark)
        self._mark_ids = frozenset(id for id in map(tokenizer.find, self._marks) if id is not None)

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> LookFront:
        """Raises `ModelError` when a file is missing or does not say enough."""
        tokenizer = Tokenizer.load(files)
        template = ChatTemplate.load(files, tokenizer.special_tokens, sees=True)
        language = {**files.config(), **(files.config().get("text_config") or {})}
        vocabulary = language.get("vocab_size", tokenizer.size)
        return cls(tokenizer, template, read_context(files), vocabulary, make_cutter(files, tokenizer))

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if isinstance(ask, Tokenize) and ask.chat is not None:
            seen = self._see(ask.chat)
            return spell(self.tokenizer, self._place(self._read_chat(seen)[0], seen.cuts).tokens, self.context)
        if isinstance(ask, Embed):
            return self._show(ask)
        if not isinstance(ask, Chat):
            prepared = super().prepare(task, ask)
            if prepared.work is not None:
                prepared.work = LookWork(**msgspec.structs.asdict(prepared.work))
            return prepared
        seen = self._see(ask)
        prepared = super().prepare(task, seen)
        work = LookWork(**msgspec.structs.asdict(prepared.work))
        placed = self._place(work.prompts[0], seen.cuts)
        work.prompts = [placed.tokens]
        work.max_tokens = [self._fit(len(placed.tokens), ask.max_tokens, "messages")]
        work.pictures, work.positions = placed.pictures, placed.positions
        prepared.facts["prompt_tokens"] = len(placed.tokens)
        return Prepared(work, notes=prepared.notes, facts=prepared.facts)

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return ShowPresenter() if isinstance(ask, Embed) else super().present(task, ask, prepared)

    def _show(self, ask: Embed) -> Prepared:
        """Pictures as vectors: what the encoder makes of them, as chats see them."""
        check_inputs(ask.inputs)
        if not all(map(is_picture, ask.inputs)):
            raise InvalidRequest("This model embeds pictures only; an image embedder takes texts too.", param="input")
        if ask.dimensions is not None or ask.prompt is not None:
            raise InvalidRequest("Vectors of a chat model are neither cut nor prompted.", param="dimensions")
        return Prepared(ShowWork(pictures={i: cut_one(each, i, self.cutter) for i, each in enumerate(ask.inputs)}))

    def describe(self) -> dict[str, Any]:
        return {**super().describe(), "sees": ["image", "video"] if self.cutter.clip_mark else ["image"]}

    def _place(self, prompt: list[int], cuts: Sequence[Cut]) -> Placed:
        """Every mark becomes as many places as its picture has vectors."""
        ids = np.asarray(prompt)
        places = np.flatnonzero(np.isin(ids, list(self._mark_ids)))
        counts = [count for cut in cuts for piece in cut.pieces for count in piece.counts]
        if len(places) != len(counts):
            raise InvalidRequest("The model's chat template does not show these pictures.", param="messages")
        if not cuts:
            return Placed(prompt, [], None)
        spread = np.ones(len(ids), np.int64)
        spread[places] = counts
        starts = iter((np.cumsum(spread) - spread)[places].tolist())
        pictures: list[Picture] = []
        grids: list[Grid] = []
        for cut in cuts:
            items = []
            for piece in cut.pieces:
                item = Item(piece.pixels, piece.digest, [next(starts) for _ in piece.counts], piece.counts, piece.size)
                items.append(item)
                if piece.grid is not None:
                    steps, rows, columns = piece.grid
                    steps //= len(piece.counts)
                    grids += [Grid(start, steps, rows, columns, piece.interval) for start in item.starts]
            pictures.append(Picture(items))
        tokens = np.repeat(ids, spread).tolist()
        return Placed(tokens, pictures, place_tokens(len(tokens), grids) if grids else None)

    def _render(self, ask: Chat, template: ChatTemplate) -> str:
        text = super()._render(ask, template)
        if not isinstance(ask, SeenChat) or not ask.cuts:
            return text
        return write_cuts(text, self.cutter, ask.cuts)

    def _see(self, ask: Chat) -> SeenChat:
        """Read every picture of the conversation. Raises `InvalidRequest` naming the part."""
        parts = [
            (part, f"messages[{i}].content[{j}]")
            for i, message in enumerate(ask.messages)
            if isinstance(message.get("content"), list)
            for j, part in enumerate(message["content"])
        ]
        self._check_words(ask.messages)
        shown = [(part, where) for part, where in parts if part.get("type") not in ("text", "refusal")]
        frames = sum(len(part.get("frames") or ()) for part, _ in shown)
        if len(shown) > MOST_PICTURES or frames > MOST_FRAMES:
            raise InvalidRequest(
                f"At most {MOST_PICTURES} pictures, and {MOST_FRAMES} frames of clips, are read at once.",
                param="messages",
            )
        cuts = [self._cut(part, where, alone=len(shown) == 1) for part, where in shown]
        messages = [
            {**message, "content": list(map(name_part, message["content"]))}
            if isinstance(message.get("content"), list)
            else message
            for message in ask.messages
        ]
        return SeenChat(**{**msgspec.structs.asdict(ask), "messages": messages}, cuts=cuts)

    def _check_words(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Words that would be taken for a picture are refused: whose places would they be?"""
        for i, message in enumerate(messages):
            content = message.get("content")
            texts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content or ()]
            for mark in self._marks:
                if any(mark in text for text in texts):
                    raise InvalidRequest(f"messages[{i}] holds {mark}, which stands for a picture.", param="messages")

    def _cut(self, part: Mapping[str, Any], where: str, *, alone: bool) -> Cut:
        kind = part.get("type")
        if kind == "image_url":
            image = part["image_url"]
            picture = read_source(image["url"], f"{where}.image_url")
            return self.cutter.cut(picture, image.get("detail") or "auto", alone=alone)
        if kind == "video" and self.cutter.clip_mark is not None:
            frames = [read_source(frame, f"{where}.video[{k}]") for k, frame in enumerate(part["frames"])]
            seconds = part.get("timestamps") or [k / (part.get("fps") or FRAMES_PER_SECOND) for k in range(len(frames))]
            return self.cutter.cut_clip(frames, seconds)
        raise InvalidRequest(f"{where} is of type {kind!r}, which this model does not read.", param=where)


def name_part(part: Mapping[str, Any]) -> Mapping[str, Any]:
    """What templates are told of a part: that there is a picture."""
    return {"image_url": {"type": "image"}, "video": {"type": "video"}}.get(str(part.get("type")), part)


def write_cuts(text: str, cutter: Cutter, cuts: Sequence[Cut]) -> str:
    """The prompt with each mark replaced by what stands for its picture. Raises `InvalidRequest` when the template
    wrote more or fewer marks."""
    whole = f"<|vision_start|>{cutter.clip_mark}<|vision_end|>"
    parts, rest = [], text
    for cut in cuts:
        marks = [mark for mark in (cutter.mark, cutter.clip_mark) if mark and mark in rest]
        if not marks:
            break
        mark = min(marks, key=rest.index)
        if mark == cutter.clip_mark and whole in rest and "<|vision_start|>" in cut.text:
            mark = whole
        before, _, rest = rest.partition(mark)
        parts += [before, cut.text]
    return "".join([*parts, rest])
