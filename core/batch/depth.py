"""Units of several ids: a token that a decoder draws, and the further ids that a depth model adds to it.

Codec language models speak in frames of many codebooks. The decoder draws a frame's first id, as any other draws its
token; a small model then draws the rest, one after the other, from the decoder's hidden state. The whole unit is fed
back. All of it stays on the device by slot, like the token itself, so the next launch need not wait for the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from polymux.core.batch.decoder import TokenBatch
from polymux.core.batch.plan import Grant
from polymux.core.batch.sequence import TokenRow, token_row
from polymux.core.compute.graphs import DecodeGraphs, Rules
from polymux.core.compute.sampling import draw_uniform
from polymux.core.engine.site import Site
from polymux.core.errors import InternalError

Draw = Callable[[int, Tensor], Tensor]
"""(number of the further id, logits (S, vocabulary)) -> ids (S,)."""

STREAM = 0x5DEECE66D
"""Mixed into a row's seed: its further ids are drawn from other numbers than its tokens."""


class DepthModel(ABC):
    """What a modality supplies beside such a decoder. It looks at nothing on the host."""

    ids: int
    """Further ids of a unit."""
    width: int
    """Of the decoder's hidden states."""
    dtype: torch.dtype
    top_k: int = 0
    """Further ids are drawn among so many of the likeliest; 0: among all."""

    @abstractmethod
    def forward(self, hidden: Tensor, tokens: Tensor, draw: Draw) -> Tensor:
        """Further ids (S, ids) for the decoder's hidden states (S, width) and drawn tokens (S,)."""

    @abstractmethod
    def ends(self, token: int, further: Sequence[int]) -> bool:
        """Whether a unit is the one that ends its sequence."""


class Depths:
    """The units of one stage's rows, by slot."""

    def __init__(self, model: DepthModel, last: Tensor, site: Site) -> None:
        """`last`: (slots,) the tokens drawn last; the very last slot is no row's."""
        device = site.device.torch
        self.model = model
        self.further = torch.zeros(len(last), model.ids, dtype=torch.int64, device=device)
        self._last = last
        self._hidden = torch.zeros(len(last), model.width, dtype=model.dtype, device=device)
        self._temperatures = torch.zeros(len(last), dtype=torch.float32, device=device)
        self._seeds = torch.zeros(len(last), dtype=torch.int64, device=device)
        self._numbers = torch.arange(model.ids, device=device)
        self._device = site.device
        self._draw = draw_among
        self.graphs: DecodeGraphs | None = None
        """The loop over a unit's ids, where it is recorded."""
        if device.type == "cuda":
            from polymux.core.compute.triton.frames import draw_place

            self._draw = draw_place
            self.graphs = DecodeGraphs(self._step, len(last) - 1, len(last) - 1, device)

    def admit(self, row: TokenRow) -> None:
        self._temperatures[row.slot].fill_(row.request.sampling.temperature)
        self._seeds[row.slot].fill_(row.request.seed ^ STREAM)

    def keep(self, slots: Tensor, batch: TokenBatch) -> None:
        """Remember the states that the logits of a launch were made of; the rows in `slots` (S,) draw from them."""
        if batch.hidden is None:
            raise InternalError("a decoder with a depth model must tell its hidden states")
        self._hidden[slots] = batch.hidden[batch.sampled[: len(slots)]]

    def deepen(self, finals: Sequence[Grant]) -> Tensor:
        """Complete the units whose tokens were just drawn: their further ids, (S, ids), valid until the next call."""
        slots = [token_row(grant.row).slot for grant in finals]
        positions = [grant.start + grant.count for grant in finals]
        if self.graphs is not None:
            return self.graphs.run(slots, positions, 0)[0]
        sent = self._device.upload({"slots": slots, "positions": positions})
        return self._step(sent["slots"], sent["positions"], None, ())[0]

    @staticmethod
    def place(row: TokenRow, place: int, start: int, end: int) -> list[int]:
        """Of the tokens from `start` to `end`, which stand from `place` on in the packed batch: the further ids of
        those that the host knows, each unit's behind its place."""
        flat: list[int] = []
        for position in range(max(start, row.prompt_length), min(end, len(row.tokens))):
            flat += (place + position - start, *row.further[position - row.prompt_length])
        return flat

    def gather(self, token_slots: Tensor, known: Tensor) -> Tensor:
        """(T, ids): what each packed token's slot has, but for those that the host knows (as `place` lists them)."""
        further = self.further[token_slots]
        if len(known):
            units = known.view(-1, 1 + self.model.ids)
            further = further.index_copy(0, units[:, 0], units[:, 1:])
        return further

    def _step(self, slots: Tensor, positions: Tensor, shared: Tensor | None, rules: Rules) -> tuple[Tensor, ...]:
        temperatures, seeds = self._temperatures[slots], self._seeds[slots]
        numbers = positions[:, None] * self.model.ids + self._numbers
        uniform = draw_uniform(seeds[:, None], numbers)  # all at once: a launch costs more than what it computes

        def draw(number: int, logits: Tensor) -> Tensor:
            return self._draw(logits, temperatures, uniform[:, number], self.model.top_k)

        further = self.model.forward(self._hidden[slots], self._last[slots], draw)
        self.further[slots] = further
        return (further,)


def draw_among(logits: Tensor, temperatures: Tensor, uniform: Tensor, top_k: int) -> Tensor:
    """Ids (S,) for logits (S, vocabulary), by inverting each row's distribution; temperature 0 takes the likeliest.

    With `top_k`, ties with the last of the k likeliest are kept. Nothing depends on the host or on other rows.
    """
    values = logits.float()
    best = values.amax(dim=-1, keepdim=True)
    greedy = temperatures == 0.0
    scaled = (values - best) / torch.where(greedy, 1.0, temperatures)[:, None]
    if 0 < top_k < values.shape[1]:
        least = scaled.topk(top_k, dim=-1).values[:, -1:]
        scaled = scaled.masked_fill(scaled < least, float("-inf"))
    cumulative = scaled.softmax(dim=-1).cumsum(dim=-1)
    # the first place where the sum exceeds the number: counting, since it needs no search on any device
    drawn = (cumulative <= uniform[:, None] * cumulative[:, -1:]).sum(dim=-1).clamp_(max=values.shape[1] - 1)
    return torch.where(greedy, values.argmax(dim=-1), drawn)
