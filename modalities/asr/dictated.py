"""Utterances as they are written down become text, each with a detokenizer of its own."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from polymux.core.engine.wire import unpack
from polymux.core.pipeline import Presenter
from polymux.core.tasks import Done, TextDelta, Understood
from polymux.core.text.detokenizer import Detokenizer, open_detokenizer
from polymux.core.text.tokenizer import Tokenizer
from polymux.core.vocabulary import Ended, Event, Output, Usage
from polymux.modalities.asr.work import LISTENED, Written


@dataclass
class Sheet:
    """One utterance's text so far."""

    detokenizer: Detokenizer
    texts: list[str] = field(default_factory=list)

    def add(self, tokens: list[int], *, last: bool) -> str:
        """What they say, as far as whole characters go. The first word's space would begin the whole text."""
        text = "".join(map(self.detokenizer.push, tokens)) + (self.detokenizer.flush() if last else "")
        text = text if any(self.texts) else text.lstrip()
        self.texts.append(text)
        return text


class DictationPresenter(Presenter):
    """Tells each utterance's words as they come, and all of it at its end."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._sheets: dict[int, Sheet] = {}
        self._seconds = 0.0

    def feed(self, event: Event) -> list[msgspec.Struct]:
        if isinstance(event, Ended):
            receipt = event.receipt
            usage = Usage(receipt.input_units, receipt.output_units, seconds=self._seconds)
            return [Done(usage, receipt)]
        if not isinstance(event, Output):
            return []
        body = unpack(event.body, LISTENED[event.kind])
        return self._tell(body) if isinstance(body, Written) else [body]

    def _tell(self, written: Written) -> list[msgspec.Struct]:
        sheet = self._sheets.get(written.index)
        if sheet is None:
            sheet = self._sheets[written.index] = Sheet(open_detokenizer(self._tokenizer))
        answers: list[msgspec.Struct] = []
        if text := sheet.add(written.tokens, last=written.last):
            answers.append(TextDelta(written.index, text))
        if written.last:
            del self._sheets[written.index]
            self._seconds += written.seconds
            answers.append(Understood(written.index, "".join(sheet.texts), written.seconds))
        return answers
