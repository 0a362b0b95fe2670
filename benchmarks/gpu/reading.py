"""Decode attention on a CUDA card: our kernel in several forms, each beside what reading its keys and values must take.

own-256, -128, -64   so many rows of 400 to 680 tokens of their own, 32 query heads on 8 key heads of 128, longest first
as-they-come-256     the same rows in any order
equal-256            rows of 540
late-256             rows of 100 to 2,000, longest first
layers-256           own-256 in a cache of 36 layers whose blocks hold all layers, as the engine's do: every launch
                     reads another layer, and no two blocks of a layer are near each other
layers-late-256      late-256 in such a cache
layers-64-256        layers-256 in blocks of 64 tokens
prefix-64            64 rows of 70 to 190 tokens behind 2,048 that they have in common
slabs-64             64 slabs of 1,500 frames, 20 heads of 64: cross-attention

`now` is what serves. Other forms of the kernel are tile, warps and stages.
Microseconds of one layer, the share of the card's copying rate, and how far from the reference in fp32.

PYTHONPATH=benchmarks:benchmarks/gpu python benchmarks/gpu/reading.py --out reading.jsonl
With TRITON_INTERPRET=1 and --tiny: small rows on the CPU, to see that it runs.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from torch import Tensor
from trials import Trials

from polymux.core.compute.attention import AttentionOptions
from polymux.core.compute.triton import decode, prefix
from polymux.core.compute.triton.decode import Form

RATE = 4.26e12
"""Bytes a second that the card copies, read and written."""


FORMS = [Form(128, 4, 2), Form(64, 4, 2), Form(64, 4, 3), Form(32, 2, 3), Form(32, 2, 4)]


@dataclass
class Case:
    name: str
    own: list[int]
    shared: int = 0
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    block: int = 16
    layers: int = 1

    @property
    def bytes(self) -> float:
        return 4.0 * (sum(self.own) + self.shared) * self.kv_heads * self.dim


def list_cases(tiny: bool) -> list[Case]:
    draw = random.Random(0)
    if tiny:
        return [
            Case("own", [5, 70, 33], heads=4, kv_heads=2, dim=16),
            Case("layers", [5, 70, 33], heads=4, kv_heads=2, dim=16, layers=3),
            Case("prefix", [3, 20], shared=32, heads=4, kv_heads=2, dim=16),
        ]
    own = sorted((draw.randint(400, 680) for _ in range(256)), reverse=True)
    late = sorted((draw.randint(100, 2000) for _ in range(256)), reverse=True)
    return [
        Case("layers-256", own, layers=36),
        Case("own-256", own),
        Case("as-they-come-256", draw.sample(own, 256)),
        Case("equal-256", [540] * 256),
        Case("late-256", late),
        Case("layers-64-256", own, layers=36, block=64),
        Case("layers-late-256", late, layers=36),
        *(Case(f"own-{rows}", sorted((draw.randint(400, 680) for _ in range(rows)), reverse=True))
          for rows in (128, 64)),
        Case("prefix-64", sorted((draw.randint(70, 190) for _ in range(64)), reverse=True), shared=2048),
        Case("slabs-64", [1500] * 64, heads=20, kv_heads=20, dim=64, block=1500),
    ]  # fmt: skip


class Tensors:
    def __init__(self, case: Case, device: str, dtype: torch.dtype) -> None:
        self.case = case
        rows = len(case.own)
        lengths = [case.shared + own for own in case.own]
        counts = [-(-length // case.block) for length in lengths]
        shape = (sum(counts), case.layers, 2, case.block, case.kv_heads, case.dim)
        blocks = torch.empty(shape, dtype=dtype, device=device)
        blocks[:, 0].normal_()
        blocks[:, 1:] = blocks[:, :1]  # the same, elsewhere
        self.layers = blocks.unbind(1)
        self.launches = 0
        self.query = torch.randn(rows, case.heads, case.dim, device=device).to(dtype)
        self.tables = torch.zeros(rows, max(counts), dtype=torch.int64, device=device)
        for table, places in zip(self.tables, torch.randperm(sum(counts), device=device).split(counts)):
            table[: len(places)] = places
        self.tables[:, : case.shared // case.block] = self.tables[:1, : case.shared // case.block]
        self.slots = torch.arange(rows, device=device)
        self.lengths = torch.tensor(lengths, device=device)
        self.longest = 4096 if case.block < 100 else case.block
        self.shared = torch.tensor([case.shared], device=device) if case.shared else None
        self.options = AttentionOptions(case.dim**-0.5, causal=False)

    @property
    def cache(self) -> Tensor:
        """What the next launch reads."""
        self.launches += 1
        return self.layers[self.launches % len(self.layers)]

    def now(self) -> Tensor:
        return decode.attend_singles(
            self.query, self.cache, self.tables, self.slots, self.lengths, self.case.block, self.longest, self.options,
            self.shared,
        )  # fmt: skip

    def cascade(self, splits: int, stretches: int, beside: bool) -> Tensor:
        """The kernels that serve a common prefix, cut otherwise: own tokens and prefix into so many parts."""
        others = {} if beside else {"beside_others": nullcontext, "wait_for_side": lambda device: None}
        with (
            mock.patch.multiple(decode, STRETCHES=stretches, choose_splits=lambda *sizes: splits, **others),
            mock.patch.object(prefix, "STRETCHES", stretches),
        ):
            return self.now()

    def read(self, form: Form) -> Tensor:
        with mock.patch.object(decode, "choose_form", lambda *sizes: form):
            return self.now()

    def exact(self) -> Tensor:
        case, parts, cache = self.case, [], self.cache
        for row, length in enumerate(self.lengths.tolist()):
            keys, values = cache[self.tables[row]].float().transpose(0, 1).flatten(1, 2)[:, :length].unbind(0)
            states = [each.repeat_interleave(case.heads // case.kv_heads, dim=1) for each in (keys, values)]
            weights = torch.einsum("hd,thd->ht", self.query[row].float(), states[0]).mul(self.options.scale).softmax(-1)
            parts.append(torch.einsum("ht,thd->hd", weights, states[1]))
        return torch.stack(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--limit", type=float, default=40.0, help="seconds after which nothing more is begun")
    args = parser.parse_args()
    trials = Trials(args.out, args.tiny, args.limit)
    device, dtype = ("cpu", torch.float32) if args.tiny else ("cuda", torch.bfloat16)
    for case in list_cases(args.tiny):
        tensors = Tensors(case, device, dtype)
        exact = tensors.exact()
        runs: list[tuple[str, Callable[[], Tensor]]] = [("now", tensors.now)]
        if case.shared:
            for cut in ((1, 8, True), (2, 8, False), (1, 8, False), (1, 16, True), (1, 4, True), (2, 16, True)):
                name = "{} own, {} of the prefix, {}".format(*cut[:2], "beside" if cut[2] else "in turn")
                runs.append((name, partial(tensors.cascade, *cut)))
        else:
            runs += [("-".join(map(str, form)), partial(tensors.read, form)) for form in FORMS]
        floor = case.bytes / RATE * 1e3
        trials.run(
            case.name, runs, exact,
            lambda ms: {"us": round(1e3 * ms, 1), "share_percent": round(100 * floor / ms, 1)},  # noqa: B023
        )  # fmt: skip
        del tensors, exact
    trials.tell(seconds=round(trials.seconds, 1))


if __name__ == "__main__":
    main()
