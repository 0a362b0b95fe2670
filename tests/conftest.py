"""Tiny models compute fastest on one thread. Set before torch is imported, here and in every process a test starts."""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
