"""What the starters that are trained here know, asked through polymux, into the ledger.

python benchmarks/starters.py see look           those in the repository
python benchmarks/starters.py see --folder DIR   another folder, whose figures are told and not recorded
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


JUDGES = {"see": judge_see, "look": judge_look}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("starters", nargs="+", choices=list(JUDGES))
    parser.add_argument("--folder", type=Path)
    told = parser.parse_args()
    for name in told.starters:
        for metric, value, unit in JUDGES[name](told.folder or MODELS / name):
            print(json.dumps({"metric": metric, "value": round(value, 4), "unit": unit}), flush=True)
            if told.folder is None:
                record("starters", metric, value, unit)


if __name__ == "__main__":
    main()
