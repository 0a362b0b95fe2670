"""One pass over rows of which some reuse what an earlier step saved: together what is shared, apart what is not.

    begin      embed, run the first block of the rows that judge by it, measure how far each signal has moved
    complete   decide; run the other blocks of the rows that compute; add saved residuals to the rest; save

Nothing is saved before everything is computed, and decisions stand, so a pass that failed can be run again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from polymux.core.batch.denoiser import BlockModel, DenoiseBatch, Streams, split_rows
from polymux.core.cache.saved import RESIDUAL, SIGNAL, Saved, SavedTokens
from polymux.core.cache.stepcache import AdaptiveRule, Reuse, StepProbe, TaylorSeer
from polymux.core.errors import InternalError

T = TypeVar("T")


@dataclass(frozen=True)
class Entry:
    """One row of the pass: the step it takes, and what it has saved; None for a row that computes every step."""

    step: int
    saved: Saved | None

    @property
    def reuse(self) -> Reuse | None:
        return self.saved.rule.reuse if self.saved is not None else None


class ReusingPass:
    """One step of some rows. After `begin`, `distances` holds what the undecided ones are decided by, or None."""

    def __init__(self, model: BlockModel, tokens: SavedTokens, batch: DenoiseBatch, entries: Sequence[Entry]) -> None:
        self.distances: Tensor | None = None
        self._model = model
        self._tokens = tokens
        self._batch = batch
        self._entries = entries
        self._computed = [entry.saved is None or entry.saved.cache.foresee(entry.step) for entry in entries]
        self._walked = self._places(lambda entry, computed: not (entry.reuse is Reuse.OUTPUT and computed is False))
        self._signals: dict[int, Tensor] = {}
        self._streams: Streams | None = None
        self._heads: Streams | None = None
        self._headed: list[int] = []
        self._undecided: list[int] = []

    def begin(self) -> None:
        """Enqueue all that needs no decision."""
        if not self._walked:
            return
        model = self._model
        self._streams = model.embed(self._batch.select(self._walked))
        self._headed = self._places(lambda entry, _: entry.reuse is Reuse.BODY)
        if self._headed:
            before = self._part(self._headed)
            self._heads = model.head(before)
            self._keep_signals(self._headed, self._heads.hidden - before.hidden)
        modulated = self._places(lambda entry, _: _sees_modulated(entry))
        if modulated:
            self._keep_signals(modulated, model.modulate(self._part(modulated)))
        self._undecided = self._places(lambda _, computed: computed is None)
        if self._undecided:
            now = torch.cat([self._signals[place] for place in self._undecided])
            then = self._tokens.read(self._saved(self._undecided), SIGNAL)
            self.distances = measure_change(now, then)

    def fetch_distances(self) -> list[float]:
        """The distances on the host. Waits for the device."""
        distances: list[float] = _need(self.distances).tolist()
        return distances

    def complete(self, distances: Sequence[float] = ()) -> Tensor:
        """Predictions of all rows, (P, *shape). `distances` are those of the undecided rows, on the host."""
        for place, distance in zip(self._undecided, distances, strict=True):
            entry = self._entries[place]
            self._computed[place] = _need(entry.saved).cache.decide(entry.step, distance)
        outputs = self._walk() if self._walked else {}
        for place, entry in enumerate(self._entries):
            saved = entry.saved
            if saved is None or not isinstance(saved.rule, TaylorSeer):
                continue
            if place in outputs:
                saved.expand(outputs[place][0], entry.step, saved.rule.order)
            else:
                outputs[place] = saved.extrapolate(entry.step)[None]
        return torch.cat([outputs[place] for place in range(len(self._entries))])

    def _walk(self) -> dict[int, Tensor]:
        """Outputs, (1, *shape), of every row that is not extrapolated."""
        streams = _need(self._streams)
        inputs = dict(zip(self._walked, split_rows(streams.hidden)))
        heads = dict(zip(self._headed, split_rows(self._heads.hidden))) if self._heads is not None else {}
        last: dict[int, Tensor] = {}
        full = [place for place in self._walked if self._computed[place]]
        if full:
            ready = [place for place in full if place in heads]
            fresh = [place for place in full if place not in heads]
            pieces = []
            if ready:
                pieces.append(_need(self._heads).select([self._headed.index(place) for place in ready]))
            if fresh:
                pieces.append(self._model.head(self._part(fresh)))
            piece = pieces[0].join(pieces[1]) if len(pieces) == 2 else pieces[0]
            last.update(zip([*ready, *fresh], split_rows(self._model.body(piece).hidden)))
        base = {**inputs, **heads}
        skipped = [place for place in self._walked if place not in last]
        if skipped:
            residuals = self._read_residuals(skipped)
            last.update({place: base[place] + residuals[place] for place in skipped})
        self._save(full, base, last)
        hidden = torch.cat([last[place] for place in self._walked])
        outputs = self._model.finish(replace(streams, hidden=hidden))
        return dict(zip(self._walked, split_rows(outputs)))

    def _read_residuals(self, places: list[int]) -> dict[int, Tensor]:
        return dict(zip(places, split_rows(self._tokens.read(self._saved(places), RESIDUAL))))

    def _save(self, full: list[int], base: dict[int, Tensor], last: dict[int, Tensor]) -> None:
        """Residuals of the rows that computed; signals of those, and of every row whose rule accumulates changes."""
        kept = [place for place in full if self._entries[place].reuse in (Reuse.BODY, Reuse.BLOCKS)]
        if kept:
            residuals = torch.cat([last[place] - base[place] for place in kept])
            self._probe(kept, residuals)
            self._tokens.write(self._saved(kept), RESIDUAL, residuals)
        moved = [
            place for place in self._signals if self._computed[place] or self._entries[place].reuse is Reuse.BLOCKS
        ]
        if moved:
            signals = torch.cat([self._signals[place] for place in moved])
            self._tokens.write(self._saved(moved), SIGNAL, signals)

    def _probe(self, places: list[int], residuals: Tensor) -> None:
        """Note how signals and residuals compare with the saved ones, where a rule asks for that."""
        for place, residual in zip(places, split_rows(residuals)):
            entry, saved = self._entries[place], _need(self._entries[place].saved)
            if not isinstance(saved.rule, StepProbe) or entry.step in saved.measured:
                continue
            signal = self._signals[place]
            before = self._tokens.read([saved], RESIDUAL) if entry.step else residual
            seen = self._tokens.read([saved], SIGNAL) if entry.step else signal
            changes = torch.cat([measure_change(signal, seen), measure_change(residual, before)])
            saved.measured[entry.step] = torch.cat([measure_ratio(residual[0], before[0])[None], changes])

    # ---- rows ----

    def _places(self, wanted: Callable[[Entry, bool | None], bool]) -> list[int]:
        return [place for place, entry in enumerate(self._entries) if wanted(entry, self._computed[place])]

    def _part(self, places: list[int]) -> Streams:
        return _need(self._streams).select([self._walked.index(place) for place in places])

    def _saved(self, places: list[int]) -> list[Saved]:
        return [_need(self._entries[place].saved) for place in places]

    def _keep_signals(self, places: list[int], signals: Tensor) -> None:
        self._signals.update(zip(places, split_rows(signals)))


def measure_change(now: Tensor, then: Tensor) -> Tensor:
    """mean |now - then| / mean |then| per row, (R,) float32; `now` and `then` are (R, tokens, dim)."""
    now, then = now.float(), then.float()
    return (now - then).abs().mean((1, 2)) / then.abs().mean((1, 2))


def measure_ratio(now: Tensor, then: Tensor) -> Tensor:
    """mean over tokens of |now| / |then|, () float32; `now` and `then` are (tokens, dim)."""
    return (now.float().norm(dim=-1) / (then.float().norm(dim=-1) + 1e-8)).mean()


def _sees_modulated(entry: Entry) -> bool:
    return entry.reuse is Reuse.BLOCKS and isinstance(_need(entry.saved).rule, AdaptiveRule | StepProbe)


def _need(value: T | None) -> T:
    if value is None:
        raise InternalError("a pass was completed that had not begun")
    return value
