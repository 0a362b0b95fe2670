"""What the starters that are trained here know, asked through polymux, into the ledger.

python benchmarks/starters.py see look           those in the repository; also paint, film, loop and presets
python benchmarks/starters.py see --folder DIR   another folder, whose figures are told and not recorded
python benchmarks/starters.py look --again DIR   what the recipe made when it was run once more, for the ledger
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from pathlib import Path

from ledger import record

STARTER = Path(__file__).parents[1] / "plugins" / "starter"
MODELS = STARTER / "polymux_starter" / "models"
sys.path.insert(0, str(STARTER / "train"))


def judge_see(folder: Path) -> list[tuple[str, float, str]]:
    import judge_see

    found = asyncio.run(judge_see.judge_at(str(folder), count=1000))
    seconds = found.pop("seconds")
    right = found.pop("all")
    by_subject = [(f"see: held-out questions right, {subject}", part, "share") for subject, part in found.items()]
    return [
        ("see: of 1,000 held-out questions right", right, "share"),
        *by_subject,
        ("see: an answer about a picture, alone", seconds, "s"),
    ]


def judge_look(folder: Path) -> list[tuple[str, float, str]]:
    import judge_look

    found = asyncio.run(judge_look.judge_at(str(folder), count=200))
    return [
        ("look: of 200 held-out pictures that find their caption", found["captions"], "share"),
        ("look: of 200 held-out captions that find their picture", found["pictures"], "share"),
    ]


def judge_paint(folder: Path) -> list[tuple[str, float, str]]:
    import judge_paint

    found = asyncio.run(judge_paint.judge_at(str(folder), count=500))
    families = [name for name in found if name not in ("all", "seconds", "faults")]
    return [
        ("paint: of 500 held-out prompts drawn right", found["all"], "share"),
        *((f"paint: held-out prompts drawn right, {name}", found[name], "share") for name in families),
        ("paint: a picture of 64x64, alone", found["seconds"], "s"),
    ]


def judge_film(folder: Path) -> list[tuple[str, float, str]]:
    import judge_film

    found = asyncio.run(judge_film.judge_at(str(folder), count=200))
    return [
        ("film: of 200 held-out films that move as asked", found["motion"], "share"),
        ("film: of 200 held-out films without any fault", found["all"], "share"),
        ("film: a clip of 13 frames of 48x48, alone", found["seconds"], "s"),
    ]


def judge_loop(folder: Path) -> list[tuple[str, float, str]]:
    """`folder` holds the folders of both."""
    import judge_loop

    found = asyncio.run(judge_loop.judge_at(str(folder / "paint"), str(folder / "see")))
    return [
        ("see and paint: questions about painted pictures answered as the prompt has it", found["all"], "share"),
        ("see and paint: the same, of pictures drawn right", found["drawn right"], "share"),
    ]


def judge_presets(folder: Path) -> list[tuple[str, float, str]]:
    """`folder` holds the folders of both; prints the table too."""
    import presets

    rows = asyncio.run(presets.compare_all(str(folder / "paint"), str(folder / "film"), 100))
    print(presets.render(rows), flush=True)
    figures = []
    exact = {row.model: row.seconds for row in rows if row.preset == "exact"}
    for row in rows:
        name = f"{row.model} by preset {row.preset}"
        if row.psnr is not None:
            figures.append((f"{name}: PSNR to exact", row.psnr, "dB"))
        figures.append((f"{name}: SSIM to exact", row.ssim, "of 1"))
        figures.append((f"{name}: right", row.right, "share"))
        figures.append((f"{name}: speed", exact[row.model] / row.seconds, "x"))
    return figures


JUDGES = {
    "see": judge_see,
    "look": judge_look,
    "paint": judge_paint,
    "film": judge_film,
    "loop": judge_loop,
    "presets": judge_presets,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starters", nargs="+", choices=list(JUDGES))
    others = parser.add_mutually_exclusive_group()
    others.add_argument("--folder", type=Path)
    others.add_argument("--again", type=Path)
    told = parser.parse_args()
    other = told.folder or told.again
    run = "" if told.again is None else "recipe run again, "
    for name in told.starters:
        folder = other or (MODELS if name in ("loop", "presets") else MODELS / name)
        for metric, value, unit in JUDGES[name](folder):
            print(json.dumps({"metric": metric, "value": round(value, 4), "unit": unit}), flush=True)
            if told.folder is None:
                record("starters", run + metric, value, unit)


if __name__ == "__main__":
    main()
