"""A round of guessing as one recorded launch: a draft model's chain of steps, the check of what it guessed, the draws.

All rows of such a launch guess, and want no more than tokens under rules of the program's own. Nothing comes to the
host in between: what was guessed stands in the results, beside what was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenModel
from polymux.core.batch.drawing import Drawer
from polymux.core.batch.packing import Packer
from polymux.core.batch.plan import Plan
from polymux.core.batch.sequence import TokenRow, can_replay
from polymux.core.batch.stage import Ticket
from polymux.core.compute.device import Device, HostCopy
from polymux.core.compute.graphs import PADDED, Recording, Rules, record

INPUTS = 4
"""Numbers of a row: its slot, the place of its newest token, how many guesses it may have, and that token."""


@dataclass(frozen=True)
class Half:
    """One of the two models, with the packer of its cache."""

    model: TokenModel
    packer: Packer


class GuessRounds:
    """Rounds of `longest` guesses, recorded when they are first wanted, for powers of two of rows."""

    def __init__(self, target: Half, draft: Half, drawer: Drawer, longest: int, most: int, device: Device) -> None:
        """`most` rows at once; that is also a slot that no row ever has."""
        self._target, self._draft, self._drawer = target, draft, drawer
        self._longest = longest
        self._device = device
        self._sizes = [1 << power for power in range((most - 1).bit_length() + 1)]
        self._padding = most
        self._input = torch.zeros(INPUTS * self._sizes[-1], dtype=torch.int64, device=device.torch)
        self._pool = torch.cuda.graph_pool_handle() if device.torch.type == "cuda" else None
        self._recorded: dict[tuple[Rules, int], Recording] = {}

    def admits(self, plan: Plan, rows: Sequence[TokenRow]) -> bool:
        """Whether every row brings its newest token and guesses, and draws as recorded steps do."""
        return can_replay(rows) and all(
            row.foresight is not None
            and row.adapter is None
            and bool(row.generated)
            and grant.start == len(row.tokens) - 1
            and grant.count == 1 + len(grant.guesses) <= 1 + self._longest
            for grant, row in zip(plan.grants, rows)
        )

    def launch(self, plan: Plan, rows: Sequence[TokenRow]) -> Ticket:
        recorded, size = self._find(rows[0].request.rules, len(rows))
        pad = [0] * (size - len(rows))
        numbers = [
            *(row.slot for row in rows),
            *[self._padding] * len(pad),
            *(grant.start for grant in plan.grants),
            *[-1] * len(pad),
            *(len(grant.guesses) for grant in plan.grants),
            *pad,
            *(row.tokens[-1] for row in rows),
            *pad,
        ]
        self._input[: len(numbers)].copy_(self._device.upload({"numbers": numbers})["numbers"])
        recorded.replay()
        names = ("guesses", "tokens", "finite", "logprobs")
        found = {name: output[: len(rows)] for name, output in zip(names, recorded.outputs)}
        return Ticket(plan, _RoundCopy(self._device.copy_to_host(found), plan))

    def _find(self, rules: Rules, rows: int) -> tuple[Recording, int]:
        sizes = [size for size in self._sizes if rows <= size]
        for size in sizes:
            if size <= PADDED * rows and (rules, size) in self._recorded:
                return self._recorded[rules, size], size
        size = sizes[0]
        slots, positions, counts, newest = self._input[: INPUTS * size].split(size)
        slots.fill_(self._padding)
        positions.fill_(-1)
        counts.zero_()
        newest.zero_()
        step = partial(self._step, slots, positions, counts, newest, rules)
        self._recorded[rules, size] = record(step, self._pool)
        return self._recorded[rules, size], size

    def _step(
        self, slots: Tensor, positions: Tensor, counts: Tensor, newest: Tensor, rules: Rules
    ) -> tuple[Tensor, ...]:
        """(B,) each -> guesses (B, longest), tokens and finite (B, longest + 1), under rules also logprobs."""
        guesses = self._guess(slots, positions, counts, newest, rules)
        order = torch.arange(self._longest + 1, device=slots.device)
        here = (order <= counts[:, None]) & (positions >= 0)[:, None]
        places = torch.where(here, positions[:, None] + order, -1)
        ids = torch.cat([newest[:, None], guesses], dim=1)
        batch = self._target.packer.pack_ladder(ids, slots, places, positions)
        logits = self._target.model.forward(batch).unflatten(0, places.shape)
        drawn = self._draw(logits, guesses, counts, slots, positions, rules)
        return guesses, *drawn

    def _guess(self, slots: Tensor, positions: Tensor, counts: Tensor, newest: Tensor, rules: Rules) -> Tensor:
        """(B, longest): a chain of the draft model's steps, and one more for the last guess's keys and values."""
        packer, guesses = self._draft.packer, []
        packer.last[slots] = newest
        with self._drawer.try_out():
            for step in range(self._longest + 1):
                places = torch.where((counts >= step) & (positions >= 0), positions + step, -1)
                logits = self._draft.model.forward(packer.pack_step(slots, places, None))
                if step == self._longest:
                    break
                guesses.append(self._drawer.draw_step(logits, slots, places + 1, rules)[0])
                packer.last[slots] = guesses[-1]
        return torch.stack(guesses, dim=1)

    def _draw(
        self, logits: Tensor, guesses: Tensor, counts: Tensor, slots: Tensor, positions: Tensor, rules: Rules
    ) -> tuple[Tensor, ...]:
        """Each row's draws one after the other, as if every guess before were right; what rules remember is what they
        knew behind the first draw that no guess foresaw."""
        drawn, known = [], []
        for step, behind in enumerate(logits.unbind(dim=1)):
            drawn.append(self._drawer.draw_step(behind.contiguous(), slots, positions + step + 1, rules))
            known.append(self._drawer.remember(slots, rules))
        tokens, *others = (torch.stack(each, dim=1) for each in zip(*drawn))
        foreseen = torch.arange(self._longest, device=slots.device) < counts[:, None]
        right = ((tokens[:, :-1] == guesses) & foreseen).long().cumprod(dim=1).sum(dim=1)
        self._drawer.recall(slots, rules, known, right)
        return tokens, *others


class _RoundCopy(HostCopy):
    """Results of a round in the order in which `collect_tokens` wants them: each row's last draw, then those before."""

    def __init__(self, copy: HostCopy, plan: Plan) -> None:
        super().__init__({})
        self._copy, self._plan = copy, plan

    def read(self) -> dict[str, Tensor]:
        found = self._copy.read()
        guesses = found["guesses"].tolist()
        counts = [len(grant.guesses) for grant in self._plan.grants]
        for grant, guessed, count in zip(self._plan.grants, guesses, counts):
            grant.guesses = guessed[:count]
        rows = [*range(len(counts)), *(row for row, count in enumerate(counts) for _ in range(count))]
        draws = [*counts, *(draw for count in counts for draw in range(count))]
        return {name: tensor[rows, draws] for name, tensor in found.items() if name != "guesses"}
