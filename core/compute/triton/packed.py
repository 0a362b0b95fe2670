"""Rows of a packed batch that see only themselves: attention straight from the merged product.

Queries, keys and values are read where the projection left them; nothing is copied, split or padded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton.tiles import attend_tiles


def attend_packed(query: Tensor, key: Tensor, value: Tensor, starts: Tensor, options: AttentionOptions) -> Tensor:
    """Attention inside each row: row r's tokens are those from starts[r] to starts[r + 1]; (T, heads, dim).

    `starts` is (R + 1,) int32. The three may be views of one tensor: only their last dimension must be dense.
    """
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    attend_tiles(query, key, value, out, starts, None, options)
    return out
