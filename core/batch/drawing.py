"""Drawing the tokens of a launch: the fast way for rows that want nothing but a token, the full one for the others."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field

import torch
from torch import Tensor

from polymux.core.batch.depth import Depths
from polymux.core.batch.plan import Grant
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.compute.device import HostCopy
from polymux.core.compute.drawer import SlotDrawer
from polymux.core.compute.masks import MaskUse
from polymux.core.compute.rules import LogitRule
from polymux.core.compute.ruling import RuleStates
from polymux.core.compute.sampling import Penalties, SampleBatch, sample, wants_penalties
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError
from polymux.core.tasks import Sampling
from polymux.core.text.guide import Guide, MaskWriter


@dataclass
class Drawing:
    """The second half of a launch: logits that wait for their draw."""

    finals: list[Grant]
    """What each draw comes behind; the guesses of one are those before this draw."""
    logits: Tensor
    """(S, vocabulary)."""
    slots: Tensor
    """(S,) int64: where the tokens go."""
    scores: dict[str, Tensor] = field(default_factory=dict)
    """Of prompts in the same launch; they come to the host together."""

    @property
    def guided(self) -> bool:
        """Some row's next token depends on the ones before it in ways only the host knows."""
        return any(token_row(grant.row).request.guide is not None for grant in self.finals)


class Drawer:
    """Draws for the rows of one stage, and keeps what their draws need from step to step."""

    def __init__(self, vocabulary: int, site: Site, depths: Depths | None = None) -> None:
        self._depths = depths
        self.vocabulary = vocabulary
        self._device = site.device
        self._penalties: dict[int, Penalties] = {}
        self._rules = RuleStates(site.settings.max_rows + 1, site.device.torch)
        self._masks = MaskWriter(vocabulary)
        on_cuda = site.device.torch.type == "cuda"
        self.slots = SlotDrawer(site.settings.max_rows + 1, site.device.torch) if on_cuda else None

    def admit(self, row: TokenRow) -> None:
        sampling = row.request.sampling
        if self._depths is not None:
            self._depths.admit(row)
        if self.slots is not None:
            self.slots.admit(row.slot, sampling.temperature, row.request.seed)
        if wants_penalties(sampling):
            self._penalties[row.slot] = Penalties.of(
                row.request.prompt, row.generated, self.vocabulary, self._device.torch
            )
        self._rules.admit(row.slot, row.request.rules, row.generated)

    def release(self, row: TokenRow) -> None:
        self._penalties.pop(row.slot, None)

    def draw(self, drawing: Drawing, last: Tensor) -> HostCopy:
        """Draw every row's token into `last` (by slot) and start their way to the host."""
        results = self.decide(drawing)
        last[drawing.slots] = results["tokens"]
        return self._device.copy_to_host({**results, **drawing.scores, **self.deepen(drawing.finals)})

    def rehearse(self, logits: Tensor, slots: Tensor) -> None:
        """Draw for nobody: what draws need is compiled and loaded."""
        if self.slots is not None:
            self.slots.draw(logits, slots, slots)
        sampling = Sampling(temperature=1.0, top_k=8, top_p=0.9, min_p=0.01)
        sample(logits[:1].float(), SampleBatch([sampling], [0], [0], [None], logprobs=1))

    def deepen(self, finals: list[Grant]) -> dict[str, Tensor]:
        """With a depth model: complete the units of the tokens that were just drawn."""
        return {} if self._depths is None else {"further": self._depths.deepen(finals)}

    def decide(self, drawing: Drawing) -> dict[str, Tensor]:
        """Every row's token, whether its logits were finite, and what else its request wants to know."""
        finals = drawing.finals
        if self.slots is not None and all(token_row(grant.row).request.plain for grant in finals):
            places = self._device.upload({"places": [grant.start + grant.count for grant in finals]})["places"]
            tokens, finite = self.slots.draw(drawing.logits, drawing.slots, places)
            return {"tokens": tokens, "finite": finite}
        return sample(drawing.logits.float(), self._describe(finals)).tensors()

    def try_out(self) -> AbstractContextManager[None]:
        """Inside, `decide` and `choose` guess: what they draw leaves no trace with the rules."""
        return self._rules.forget()

    def draw_step(
        self, logits: Tensor, slots: Tensor, positions: Tensor, rules: tuple[LogitRule, ...]
    ) -> tuple[Tensor, ...]:
        """What a recorded step draws for rows at these `positions` (R,): as `choose` where they carry rules, else
        tokens and whether the logits were finite. Looks at nothing on the host."""
        if rules:
            return self.choose(logits, slots, rules)
        if self.slots is None:
            raise InternalError("only a CUDA device records steps")
        return self.slots.draw(logits, slots, positions)

    def choose(self, logits: Tensor, slots: Tensor, rules: tuple[LogitRule, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """The likeliest tokens (R,) under rules that all rows carry, whether each row's logits were finite (R,), and
        the tokens' logprobs (R,). Looks at nothing on the host."""
        fused = self._rules.fuse(rules, self.vocabulary)
        if fused is not None:
            return fused(logits, slots, self._rules.find(rules))
        values = logits.float()
        finite = torch.isfinite(values.amax(dim=-1)) & torch.isfinite(values.amin(dim=-1))
        values = self._rules.apply(values, slots, rules)
        best, tokens = values.max(dim=-1)
        self._rules.advance(tokens, slots, rules)
        return tokens, finite, best - values.logsumexp(dim=-1)

    def remember(self, slots: Tensor, rules: tuple[LogitRule, ...]) -> list[Tensor]:
        """What rules know of rows now, for `recall`."""
        return self._rules.remember(slots, rules)

    def recall(
        self, slots: Tensor, rules: tuple[LogitRule, ...], known: Sequence[Sequence[Tensor]], which: Tensor
    ) -> None:
        """Rules know again what they knew of each row when `known[which]` was remembered."""
        self._rules.recall(slots, rules, known, which)

    def _describe(self, finals: list[Grant]) -> SampleBatch:
        rows = [token_row(grant.row) for grant in finals]
        # a row watches where its first token is drawn
        watched = [
            row.request.watched if grant.start + grant.count == row.prompt_length else ()
            for row, grant in zip(rows, finals)
        ]
        return SampleBatch(
            samplings=[row.request.sampling for row in rows],
            seeds=[row.request.seed for row in rows],
            positions=[grant.start + grant.count for grant in finals],
            penalties=[self._penalties.get(row.slot) for row in rows],
            logprobs=max((row.request.logprobs for row in rows if row.request.logprobs is not None), default=None),
            rules=[
                *self._mask(rows),
                *self._rules.gather(
                    [row.request.rules for row in rows],
                    [row.slot for row in rows],
                    [grant.guesses for grant in finals],
                ),
            ],
            watched=watched,
        )

    def _mask(self, rows: list[TokenRow]) -> list[MaskUse]:
        guides: list[Guide] = []
        places: list[int] = []
        for place, row in enumerate(rows):
            if row.request.guide is not None and row.reason is None:  # one that ended draws nothing that counts
                guides.append(row.request.guide)
                places.append(place)
        if not guides:
            return []
        where = self._device.upload({"rows": places})["rows"]
        return [MaskUse(where, self._device.send(self._masks.write(guides)))]
