"""What the one-pass draw needs of every row, kept on the device by slot."""

from __future__ import annotations

import torch
from torch import Tensor


class SlotDrawer:
    """Temperatures and seeds by slot, for rows that want nothing but a token."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._temperatures = torch.zeros(slots, dtype=torch.float32, device=device)
        self._seeds = torch.zeros(slots, dtype=torch.int64, device=device)

    def admit(self, slot: int, temperature: float, seed: int) -> None:
        self._temperatures[slot].fill_(temperature)
        self._seeds[slot].fill_(seed)

    def draw(self, logits: Tensor, slots: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (R,) and whether each row's logits were finite (R,), for logits (R, vocabulary)."""
        from polymux.core.compute.triton.draw import draw

        return draw(logits, self._temperatures, self._seeds, slots, positions)
