"""What matrix products cost on a card that has been busy for a second: at full power its clock falls.

For the products of a layer and several numbers of tokens: TFLOP/s of the first launches after a pause, then of a second
without one; the clock and the power meanwhile; and the same on zeros, which cost less power. Then a launch of the whole
model, likewise.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/heat.py --out heat.jsonl
"""

from __future__ import annotations

import argparse
import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from mixed import build, lay_out, replay, share_out

SHAPES = {"qkv": (4096, 6144), "o": (4096, 4096), "up": (4096, 24576), "down": (12288, 4096)}


class Watch:
    """Clock (MHz) and power (W), as often as the card's own tool tells them."""

    def __init__(self) -> None:
        self.seen: list[tuple[float, float]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def _look(self) -> None:
        query = ["nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant", "--format=csv,noheader,nounits"]
        while not self._over.is_set():
            told = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split(",")
            self.seen.append((float(told[0]), float(told[1])))

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()


def clock(run: Callable[[], object], times: int) -> float:
    """Milliseconds of one."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times


def heat(run: Callable[[], object], seconds: float = 1.0) -> dict[str, Any]:
    """Milliseconds after a pause and without one."""
    run()
    torch.cuda.synchronize()
    time.sleep(0.5)
    cool = clock(run, 3)
    with Watch() as watch:
        clock(run, max(1, int(1e3 * seconds / cool)))
        hot = clock(run, max(1, int(300 / cool)))
    return {"cool_ms": cool, "hot_ms": hot, "clock_power": watch.seen[len(watch.seen) // 2 :][:4]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=Path, default=Path(__file__).with_name("shapes.json"))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()

    def tell(found: dict[str, Any]) -> None:
        print(json.dumps(found), flush=True)
        if args.out:
            with args.out.open("a") as file:
                file.write(json.dumps(found) + "\n")

    with torch.inference_mode():
        for name, (wide, out) in SHAPES.items():
            for tokens in (1024, 2048, 4096, 8192):
                for kind in ("normal", "zeros") if tokens == 2048 else ("normal",):
                    x = torch.randn(tokens, wide, device="cuda").bfloat16()
                    weight = [(torch.randn(out, wide, device="cuda") * 0.02).bfloat16() for _ in range(4)]
                    if kind == "zeros":
                        x.zero_()
                        for each in weight:
                            each.zero_()
                    turn = iter(range(10**9))
                    run = lambda: torch.nn.functional.linear(x, weight[next(turn) % 4])  # noqa: E731, B023
                    found = heat(run, 0.4)
                    flops = 2e-9 * tokens * wide * out
                    speed = {key[:-3]: flops / found[key] for key in ("cool_ms", "hot_ms")}
                    tell({"product": name, "tokens": tokens, "values": kind, **speed, **found})
        stage = build(json.loads(args.shapes.read_text())["qwen3-8b"], tiny=False)
        stage.rehearse()
        stage._mixed.record_few()
        while stage._mixed.record_more():
            pass
        for tokens in (1024, 2048):
            launch = replay(stage, tokens, 32)["launch"]
            tell({"launch": "recorded", "tokens": tokens, **heat(launch)})
            tell({"launch": "recorded", "tokens": tokens, "hot_parts_ms": share_out(launch, False)})
            plan = lay_out(stage, tokens, 32)
            batch = stage._packer.pack(plan)
            direct = lambda: stage.model.forward(batch)  # noqa: E731, B023
            tell({"launch": "direct", "tokens": tokens, **heat(direct)})
            tell({"launch": "direct", "tokens": tokens, "hot_parts_ms": share_out(direct, False)})


if __name__ == "__main__":
    main()
