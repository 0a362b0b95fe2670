"""Names of requests and answers: unlike any other, and no secret."""

from __future__ import annotations

import random


def draw_id() -> str:
    """128 random bits in hexadecimal. Without a system call, which `uuid4` costs."""
    return f"{random.getrandbits(128):032x}"
