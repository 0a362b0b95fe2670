"""Tiny models compute fastest on one thread, and threads that wait must not spin: other tests want the core.

Set before torch is imported, here and in every process a test starts.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
