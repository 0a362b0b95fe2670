"""What `mkdocs build` writes into pages: the figures, straight from benchmarks/results, so that they are never stale."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from ledger import RESULTS
from table import read_newest, render

MARK = "<!-- figures -->"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: called for every page."""
    return markdown.replace(MARK, render(read_newest(RESULTS))) if MARK in markdown else markdown
