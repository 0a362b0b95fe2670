"""A listening job: sound comes in through its inbox, utterances go out as they are found and written down.

One strand hears: it takes the messages in order, asks the detector, and says where utterances begin and end. Each
utterance has a scribe, a strand of its own; the next one may already be spoken while the last is still written.
"""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np

from polymux.core.batch.oneshot import OneShotStage
from polymux.core.batch.row import Signal
from polymux.core.engine.job import Job
from polymux.core.engine.wire import unpack
from polymux.core.tasks import (
    Clear,
    Cleared,
    Commit,
    Committed,
    Hear,
    Leave,
    Listened,
    ListenMessage,
    SpeechStarted,
    SpeechStopped,
    Uncommitted,
)
from polymux.modalities.asr.activity import FRAME, Listener
from polymux.modalities.asr.desk import Desk
from polymux.modalities.asr.features import RATE
from polymux.modalities.asr.scribe import Scribe
from polymux.modalities.asr.utterance import Utterance
from polymux.modalities.asr.utterances import Edge, Endpointing, Utterances
from polymux.modalities.asr.work import ListenWork

LEAST = RATE // 10
"""Samples that are worth a commit."""
BACKLOG = 60 * RATE
"""Samples that may wait to be written down before hearing pauses."""
TOGETHER = 2 * RATE
"""Samples that may be heard at once, where so much is there already."""
QUIET = RATE * 3 // 20
"""Samples of silence after which an utterance may be over: longer than most gaps between words."""
RECENT = RATE
"""Samples behind the padding that stay at hand: an utterance is certain only some time after it began."""


class Dictation:
    """`run` returns after `Leave`, when everything is written down. Positions are samples of all the sound."""

    def __init__(self, job: Job, desk: Desk, activity: OneShotStage, work: ListenWork) -> None:
        self._job = job
        self._desk = desk
        self._work = work
        self._listener = Listener(activity)
        self._turns = Utterances(Endpointing())
        self._recent = np.empty(0, np.float32)
        """The newest sound, up to `_heard`."""
        self._heard = 0
        self._told = 0
        self._pushed = 0
        """Up to here the sound is in the current utterance."""
        self._count = 0
        self._scribe: Scribe | None = None
        """Of the current utterance."""
        self._writing: deque[tuple[Scribe, Signal]] = deque()
        self._following: ListenMessage | ListenWork | None = None
        """What came behind sound that was heard at once."""
        self._tune(work)

    async def run(self) -> None:
        while True:
            match await self._receive():
                case Hear(samples=samples):
                    await self._hear(samples)
                case Commit():
                    self._commit()
                case Clear():
                    self._clear()
                    self._emit(Cleared())
                case ListenWork() as work:
                    self._tune(work)
                case Leave():
                    break
        self._clear()
        while self._writing:
            await self._writing.popleft()[1]

    # ---- messages ----

    async def _receive(self) -> ListenMessage | ListenWork:
        """The next message. Sound that came meanwhile is one: who is late catches up in one pass, not in many."""
        message, self._following = self._following or await self._unpack(), None
        if not isinstance(message, Hear):
            return message
        pieces, count = [message.samples], len(message.samples)
        while self._job.posted and count < TOGETHER:
            following = await self._unpack()
            if not isinstance(following, Hear):
                self._following = following
                break
            pieces.append(following.samples)
            count += len(following.samples)
        return Hear(np.concatenate(pieces)) if len(pieces) > 1 else message

    async def _unpack(self) -> ListenMessage | ListenWork:
        return unpack(await self._job.receive(), ListenMessage | ListenWork)  # type: ignore[type-var]

    async def _hear(self, samples: np.ndarray) -> None:
        await self._wait_for_scribes()
        self._recent = np.concatenate([self._recent, samples])
        self._heard += len(samples)
        if self._scribe is None and self._work.turns is None:
            self._begin(self._heard - len(samples))
        for probability in await self._listener.hear(self._job, samples):
            edges = list(self._turns.feed(np.array([probability])))
            if self._work.turns is not None:
                self._turn(edges)
            self._push(self._turns.position)
        self._forget_old()
        if self._heard - self._told >= RATE:
            self._told = self._heard
            self._emit(Listened(self._heard / RATE))

    def _commit(self) -> None:
        if self._scribe is None or self._heard - self._scribe.utterance.start < LEAST:
            length = 0 if self._scribe is None else self._heard - self._scribe.utterance.start
            self._emit(Uncommitted(length / RATE))
            return
        self._push(self._heard)
        self._end(self._scribe, self._heard, asked=True)
        self._turns.reset()

    def _clear(self) -> None:
        if self._scribe is not None:
            self._scribe.abandon()
            self._scribe = None
        self._turns.reset()

    def _tune(self, work: ListenWork) -> None:
        """What is heard from here on; an utterance under way keeps its language and prompt."""
        if (work.turns is None) != (self._work.turns is None):
            self._clear()  # it began by a rule that no longer holds
        self._work = work
        if work.turns is not None:
            self._turns.retune(
                Endpointing(
                    threshold=work.turns.threshold,
                    silence=work.turns.silence_ms / 1000,
                    padding=work.turns.prefix_ms / 1000,
                )
            )

    # ---- utterances ----

    def _turn(self, edges: list[Edge]) -> None:
        for edge in edges:
            if edge.begins:
                scribe = self._begin(edge.position)
                self._emit(SpeechStarted(scribe.utterance.index, edge.position / RATE))
            elif self._scribe is not None:
                self._push(self._turns.position)
                self._emit(SpeechStopped(self._scribe.utterance.index, edge.position / RATE))
                self._end(self._scribe, edge.position)

    def _begin(self, position: int) -> Scribe:
        utterance = Utterance(self._count, position)
        self._count += 1
        self._pushed = position
        self._scribe = scribe = Scribe(self._job, self._desk, self._work, utterance)
        self._writing.append((scribe, self._job.spawn(scribe.write())))
        return scribe

    def _push(self, position: int) -> None:
        """The current utterance gets the sound up to `position`."""
        if self._scribe is None or position <= self._pushed:
            return
        utterance = self._scribe.utterance
        base = self._heard - len(self._recent)
        samples = self._recent[max(self._pushed - base, 0) : position - base]
        utterance.push(samples, voiced=self._turns.speaking and not self._turns.silence)
        self._pushed = position
        if self._turns.silence >= QUIET and not utterance.quiet:
            utterance.hush()
            self._scribe.hurry()

    def _end(self, scribe: Scribe, position: int, *, asked: bool = False) -> None:
        utterance = scribe.utterance
        self._scribe = None
        utterance.close(position - utterance.start)
        scribe.hurry()
        self._emit(Committed(utterance.index, utterance.length / RATE, asked))

    async def _wait_for_scribes(self) -> None:
        while self._writing and self._writing[0][1].done:
            await self._writing.popleft()[1]  # raises what went wrong there
        while sum(scribe.utterance.held for scribe, _ in self._writing) > BACKLOG:
            await self._writing[0][0].progress()
            while self._writing and self._writing[0][1].done:
                await self._writing.popleft()[1]

    def _forget_old(self) -> None:
        """Keep what an utterance may still begin with, and what is not judged yet."""
        padding = self._work.turns.prefix_ms * RATE // 1000 if self._work.turns is not None else 0
        keep = self._heard - self._turns.position + padding + RECENT + FRAME
        if len(self._recent) > 2 * keep:
            self._recent = self._recent[-keep:].copy()

    def _emit(self, event: msgspec.Struct) -> None:
        self._job.emit(type(event).__name__, event)
