"""The README's figures are those of the results file, and every one of them says where and when it was measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIELDS = {"benchmark", "metric", "value", "unit", "peer", "peer_value", "hardware", "date", "commit"}


def test_the_readme_shows_the_newest_figures() -> None:
    """Otherwise run `python benchmarks/table.py`."""
    done = subprocess.run([sys.executable, ROOT / "benchmarks" / "table.py", "--check"], check=False)
    assert done.returncode == 0


def test_every_figure_is_whole() -> None:
    for line in (ROOT / "benchmarks" / "results" / "RESULTS.jsonl").read_text().splitlines():
        figure = json.loads(line)
        assert figure.keys() == FIELDS
        assert figure["hardware"] and figure["date"] and isinstance(figure["value"], int | float)
        assert (figure["peer"] is None) == (figure["peer_value"] is None)
