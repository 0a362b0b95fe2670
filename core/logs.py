"""How log lines look, the same in every process of a server."""

from __future__ import annotations

import logging
import sys


def open_log() -> None:
    """Warnings and worse go to stderr, with their level and the part of polymux that they come from."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s", stream=sys.stderr)
