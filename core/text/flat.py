"""Token ids of several texts as two arrays: what crosses processes and goes to a device in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np


def flatten(texts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """The ids of all texts, one text behind the other, and how many each has: int32."""
    lengths = np.fromiter(map(len, texts), np.int32, len(texts))
    return np.fromiter(chain.from_iterable(texts), np.int32, int(lengths.sum())), lengths
