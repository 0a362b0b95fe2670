"""Tables of figures, made from `results/RESULTS.jsonl`: the newest line of every metric, unit and peer.

`results/FIGURES.md` has them all, the README those that stand beside a peer's.

python benchmarks/table.py          rewrite both
python benchmarks/table.py --check  exit 1 if they are not what the results say
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ledger import RESULTS

README = Path(__file__).parents[1] / "README.md"
FIGURES = RESULTS.with_name("FIGURES.md")
BEGIN, END = "<!-- figures: python benchmarks/table.py -->", "<!-- end of figures -->"

ORDER = (
    "language",
    "gateway",
    "tokens",
    "online",
    "embeddings",
    "vision",
    "recognition",
    "realtime",
    "speech",
    "denoise",
    "diffusion_arrivals",
    "starters",
)
"""Benchmarks whose figures the README shows; the others are for engineers, and stand below these in `FIGURES.md`."""


def read_newest(results: Path) -> list[dict[str, Any]]:
    newest: dict[tuple[str, ...], dict[str, Any]] = {}
    for line in results.read_text().splitlines():
        figure = json.loads(line)
        key = (figure["benchmark"], figure["metric"], figure["unit"], str(figure["peer"]))
        newest.pop(key, None)
        newest[key] = figure
    return sorted(newest.values(), key=lambda figure: _order(figure["benchmark"]))


def render(figures: list[dict[str, Any]]) -> str:
    rows = ["| what | ours | peer | theirs | ratio | measured |", "|---|--:|---|--:|--:|---|"]
    for figure in figures:
        value, peer_value = figure["value"], figure["peer_value"]
        ratio = "" if not peer_value else f"{value / peer_value:.2f}"
        theirs = "" if peer_value is None else _number(peer_value)
        measured = f"{figure['date']}, {figure['hardware']}"
        cells = (
            f"{figure['benchmark']}: {figure['metric']}",
            f"{_number(value)} {figure['unit']}",
            figure["peer"] or "",
            theirs,
            ratio,
            measured,
        )
        rows.append("| " + " | ".join(cells) + " |")
    return "\n".join(rows)


def insert(readme: str, table: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{after}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _order(benchmark: str) -> int:
    return ORDER.index(benchmark) if benchmark in ORDER else len(ORDER)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    figures = read_newest(RESULTS)
    compared = [figure for figure in figures if figure["benchmark"] in ORDER and figure["peer"]]
    wanted = {
        README: insert(README.read_text(), render(compared)),
        FIGURES: f"# Figures\n\nFrom `RESULTS.jsonl`, by `python benchmarks/table.py`.\n\n{render(figures)}\n",
    }
    if arguments.check:
        return int(any(not file.exists() or file.read_text() != text for file, text in wanted.items()))
    for file, text in wanted.items():
        file.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
