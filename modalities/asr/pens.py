"""Who may look next, where looks do not gain by sharing passes: on a CPU each one slows the others down.

Looks that are last words begin at once. The others wait here, not in the engine's lanes: what waits there is old when
its turn comes, while one that begins late sees all that was said by then. Of those, utterances of which nothing is told
yet go first.
"""

from __future__ import annotations

from polymux.modalities.asr.utterance import Utterance


class Pens:
    """So many looks at once; None: any number."""

    def __init__(self, count: int | None = None) -> None:
        self._count = count
        self._busy = 0
        self._waiting: dict[Utterance, bool] = {}
        """In order of arrival, and whether something of it is told."""

    def take(self, utterance: Utterance, *, told: bool, urgent: bool) -> bool:
        """Whether it may be looked at now: then `give_back` follows. Otherwise it waits, and is woken to ask again.

        `told`: something of it is told already.
        """
        if not urgent and self._count is not None:
            self._waiting.setdefault(utterance, told)
            if self._busy >= self._count or self._next() is not utterance:
                return False
        self.leave(utterance)
        self._busy += 1
        return True

    def give_back(self) -> None:
        self._busy -= 1
        if (utterance := self._next()) is not None:
            utterance.wake()

    def leave(self, utterance: Utterance) -> None:
        """It does not wait any more: one that does must ask again when it is woken, or all others wait for it."""
        self._waiting.pop(utterance, None)

    def _next(self) -> Utterance | None:
        return min(self._waiting, key=lambda utterance: self._waiting[utterance], default=None)
