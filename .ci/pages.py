"""What `mkdocs build` writes by itself: figures, the contract, and the list of design pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
FIGURES, CONTRACT = "<!-- figures -->", "<!-- contract -->"


def on_config(config: Any) -> Any:
    """mkdocs' hook: every page of the modalities and of the design stands in the navigation, whoever wrote it."""
    for section in config.nav:
        known = section.get("Modalities")
        if known is not None:
            shown = {path for entry in known for path in entry.values()}
            found = [f"modalities/{path.name}" for path in sorted((ROOT / "docs" / "modalities").glob("*.md"))]
            known += [path for path in found if path not in shown]
    pages = sorted((ROOT / "docs" / "design").glob("*.md"), key=lambda path: (path.stem != "architecture", path.stem))
    config.nav.append({"Design": [f"design/{path.name}" for path in pages]})
    return config


def on_page_markdown(markdown: str, **_: Any) -> str:
    """mkdocs' hook: called for every page."""
    if FIGURES in markdown:
        benchmarks = str(ROOT / "benchmarks")
        if benchmarks not in sys.path:
            sys.path.insert(0, benchmarks)
        from ledger import RESULTS
        from table import read_newest, render

        markdown = markdown.replace(FIGURES, render(read_newest(RESULTS)))
    if CONTRACT in markdown:
        from polymux.core.plugins.contract import write_contract

        markdown = markdown.replace(CONTRACT, write_contract())
    return markdown
