"""Token masks from the host, applied to logits on the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class MaskUse:
    """Masks of one launch, used like a logit rule that remembers nothing."""

    rows: Tensor
    """(n,) int64: places in the sampled batch."""
    masks: Tensor
    """(n, words) int32 on the device: bit `t % 32` of word `t // 32` says whether token t is allowed."""

    def apply(self, logits: Tensor) -> Tensor:
        """The masked rows of the logits (R, vocabulary) replaced; others untouched."""
        bits = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = ((self.masks[:, :, None] >> bits) & 1).flatten(1)[:, : logits.shape[1]]
        ruled = logits[self.rows].masked_fill(allowed == 0, float("-inf"))
        return logits.index_copy(0, self.rows, ruled)

    def advance(self, tokens: Tensor) -> None:
        """The host advances what made the masks."""
