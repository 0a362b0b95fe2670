"""The device-free half of embedding pictures, and texts in the same space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.errors import ContextTooLong, InvalidRequest
from polymux.core.generation.limits import MAX_INPUTS, check_ids
from polymux.core.pictures import read_source
from polymux.core.pipeline import Front, Prepared, Presenter
from polymux.core.tasks import Done, Embed, Vector
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.vision.cut import Cutter, TileCutter
from polymux.modalities.vision.processor import read_processor
from polymux.modalities.vision.work import Item, ShowWork

if TYPE_CHECKING:
    from polymux.core.models import ModelFiles

MOST_PICTURES = 256
"""Of one request."""


class ShowFront(Front):
    """Embeds texts and pictures of one two-tower model. `longest` is in tokens, special ones included."""

    def __init__(self, tokenizer: Tokenizer, cutter: Cutter, longest: int, width: int, *, lower: bool = False) -> None:
        """`lower`: texts are read in lower case (SigLIP)."""
        self.tokenizer = tokenizer
        self.cutter = cutter
        self.longest = longest
        self.width = width
        self._lower = lower

    @classmethod
    def load(cls, files: ModelFiles, options: Mapping[str, Any]) -> ShowFront:
        """Raises `ModelError` when a file is missing."""
        config = files.config()
        siglip = str(config.get("model_type")).startswith("siglip")
        text, vision = config.get("text_config") or {}, config.get("vision_config") or {}
        longest = text.get("max_position_embeddings", 64 if siglip else 77)
        width = vision.get("hidden_size", 768) if siglip else config.get("projection_dim", 512)
        cutter = TileCutter(read_processor(files), "", 1)
        return cls(Tokenizer.load(files), cutter, longest, width, lower=siglip)

    def prepare(self, task: str, ask: msgspec.Struct) -> Prepared:
        if not isinstance(ask, Embed):
            raise InvalidRequest(f"This model does not serve {task}.")
        check_inputs(ask.inputs)
        if ask.dimensions not in (None, self.width):
            raise InvalidRequest(f"This model's vectors have {self.width} dimensions.", param="dimensions")
        if ask.prompt is not None:
            raise InvalidRequest("This model has no prompts.", param="prompt_name")
        texts = {i: self._read(each, i, ask.truncate) for i, each in enumerate(ask.inputs) if not is_picture(each)}
        pictures = {i: cut_one(each, i, self.cutter) for i, each in enumerate(ask.inputs) if is_picture(each)}
        return Prepared(ShowWork(texts=texts, pictures=pictures, tokens=sum(map(len, texts.values()))))

    def present(self, task: str, ask: msgspec.Struct, prepared: Prepared) -> Presenter:
        return ShowPresenter()

    def describe(self) -> dict[str, Any]:
        return {"dimensions": self.width, "longest_input": self.longest, "sees": ["image"]}

    def _read(self, text: Any, index: int, truncate: bool) -> list[int]:
        where = f"input[{index}]"
        text = text["text"] if isinstance(text, dict) else text
        if not text:
            raise InvalidRequest(f"{where} is empty.", param="input")
        if isinstance(text, str):
            text = text.lower() if self._lower else text
            ids = self.tokenizer.encode(text, longest=self.longest if truncate else None)
        else:
            ids = check_ids(text, self.tokenizer.size, where, "input")
            ids = ids[: self.longest] if truncate else ids
        if len(ids) > self.longest:
            raise ContextTooLong(
                f"{where} has {len(ids)} tokens; this model reads {self.longest}. Shorten it, or set truncate.",
                param="input",
            )
        return ids


class ShowPresenter(Presenter):
    """Tells the vectors as they come."""

    def feed(self, event: Event) -> list[msgspec.Struct]:
        match event:
            case Output(body=body):
                return [unpack(body, Vector)]
            case Ended(receipt=receipt):
                return [Done(Usage(input_tokens=receipt.input_units), receipt)]
        return []


def is_picture(each: Any) -> bool:
    return isinstance(each, dict) and each.get("type") == "image_url"


def check_inputs(inputs: Sequence[Any]) -> None:
    """Raises `InvalidRequest` for too many, or none."""
    if not 1 <= len(inputs) <= MAX_INPUTS or sum(map(is_picture, inputs)) > MOST_PICTURES:
        raise InvalidRequest(
            f"input holds {len(inputs)} items; 1 to {MAX_INPUTS} are allowed, of them {MOST_PICTURES} pictures.",
            param="input",
        )


def cut_one(part: Mapping[str, Any], index: int, cutter: Cutter) -> Item:
    """A picture as one item of the encoder. Raises `InvalidRequest`."""
    where = f"input[{index}].image_url"
    image = part["image_url"]
    pieces = cutter.cut(read_source(image["url"], where), image.get("detail") or "auto", alone=True).pieces
    if len(pieces) != 1:
        raise InvalidRequest("This model looks at pictures in pieces, which are not one vector.", param=where)
    (piece,) = pieces
    return Item(piece.pixels, piece.digest, [], piece.counts, piece.size)
